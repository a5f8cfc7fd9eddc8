"""A rollout node that is not heard goes on, and gives account of every token when it is heard
again."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightrl.messages.nodes import Bye, Drain, Heartbeat
from lightrl.messages.responses import Abort, TokenChunk
from lightrl.messages.weights import WeightsFailed, WeightsReady
from tests.daemon.test_runs import children_of
from tests.support.daemons import DEADLINE_S, Proxy, make_config
from tests.support.scripted_coordinator import ScriptedHead, joined, rollout_daemon

pytestmark = pytest.mark.usefixtures("warm_daemons")

NAMES = ("p0@0#0", "p0@0#1", "p1@0#0")
# About 1.2 s of work.
SOME = {"rollout": {"engine_args": {"t0_ms": 5.0, "mean_length": 0.0}, "max_response_length": 200}}
ENDLESS = {
    "rollout": {"engine_args": {"t0_ms": 5.0, "mean_length": 0.0}, "max_response_length": 50_000},
    "train": {"max_tokens_per_gpu": 60_000},
}


def scripted(tmp_path: Path, **changes: dict[str, Any]) -> ScriptedHead:
    return ScriptedHead(make_config(tmp_path, **changes), tmp_path)


async def welcome(head: ScriptedHead) -> None:
    """Takes the node in and has it serve version 0."""
    hello = await head.hello()
    assert (hello.serves, hello.running) == (None, ())
    head.send(head.welcome)
    head.offer("a", 0)
    await head.expect(WeightsReady)


async def some_tokens(head: ScriptedHead, num_chunks: int = 2) -> None:
    for _ in range(num_chunks):
        await head.expect(TokenChunk)


def test_after_a_broken_connection_no_token_is_missing_and_nothing_had_to_be_moved(tmp_path: Path):
    async def scenario():
        async with (
            scripted(tmp_path, **SOME) as head,
            Proxy(head.address) as proxy,
            rollout_daemon(proxy.address, head.key_file),
        ):
            await welcome(head)
            incarnation = head.heard[0].incarnation  # type: ignore[union-attr]
            head.generate(*NAMES[:2])
            head.generate(NAMES[2], prefix=11)
            await some_tokens(head)
            head.skip()
            proxy.cut()
            hello = await head.hello()
            assert hello.incarnation == incarnation
            assert hello.serves == (0, head.files[0].digest)
            assert sorted(hello.running) == sorted((n, 1) for n in NAMES)
            since = len(head.heard)
            head.generate("late")  # as if ordered before the hello was read: it is not claimed
            head.send(head.welcome)
            await head.until_finished(*NAMES, since=since)
            assert not any(
                isinstance(m, TokenChunk | Heartbeat) for m in head.heard[since - 1 : since]
            )
            for name in NAMES:
                offset, tokens = joined(head.items(name, since))
                assert offset == (11 if name == NAMES[2] else 0)
                assert tokens == head.expected(name, 200)[offset:]
            assert not head.items("late")

    asyncio.run(scenario())


@pytest.mark.e2e
def test_node_says_nothing_but_hello_before_it_is_welcomed_again(tmp_path: Path):
    async def scenario():
        async with (
            scripted(tmp_path, **SOME) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            await head.ask_to_rejoin()
            since = len(head.heard)
            await until_idle(daemon.pid)
            assert head.heard[since:] == []
            head.send(head.welcome)
            await head.until_finished(*NAMES, since=since)
            for name in NAMES:
                assert joined(head.items(name, since)) == (0, head.expected(name, 200))

    asyncio.run(scenario())


def test_coordinator_that_comes_back_as_another_process_is_told_what_finished_meanwhile(
    tmp_path: Path,
):
    async def scenario():
        async with (
            scripted(tmp_path, **SOME) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            head.vanish()
            await until_idle(daemon.pid)
            since = len(head.heard)
            head.skip()
            await head.come_back()
            hello = await head.hello()
            assert hello.incarnation == head.heard[0].incarnation  # type: ignore[union-attr]
            assert hello.serves == (0, head.files[0].digest)
            assert sorted(hello.running) == sorted((n, 1) for n in NAMES)
            head.send(head.welcome)
            await head.until_finished(*NAMES, since=since)
            for name in NAMES:
                assert joined(head.items(name, since)) == (0, head.expected(name, 200))
            assert all(
                i.finish_reason == "length" for n in NAMES for i in head.items(n, since)[-1:]
            )

    asyncio.run(scenario())


def test_what_the_coordinator_aborts_or_a_newer_version_replaces_is_not_claimed_again(
    tmp_path: Path,
):
    async def scenario():
        async with (
            scripted(tmp_path, **ENDLESS) as head,
            rollout_daemon(head.address, head.key_file),
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            head.send(Abort(((NAMES[0], 1), (NAMES[1], 7))))
            await head.until_finished(NAMES[0])
            hello = await head.ask_to_rejoin()
            assert sorted(hello.running) == [(NAMES[1], 1), (NAMES[2], 1)]
            head.send(head.welcome)
            head.send(Abort(((NAMES[1], 1), (NAMES[2], 1))))
            manifest = head.offer("a", 1)
            await head.expect(WeightsReady, lambda m: m.policy_version == 1)
            hello = await head.ask_to_rejoin()
            assert (hello.serves, hello.running) == ((1, manifest.digest), ())

    asyncio.run(scenario())


@pytest.mark.e2e
def test_version_offered_once_more_is_confirmed_without_being_loaded_again(tmp_path: Path):
    async def scenario():
        async with scripted(tmp_path, **SOME) as head, rollout_daemon(head.address, head.key_file):
            await welcome(head)
            head.offer("a", 0)
            again = await head.expect(WeightsReady)
            assert again == WeightsReady(0, head.files[0].digest)
            head.generate(*NAMES)
            await head.until_finished(*NAMES)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_order_for_a_version_that_is_not_loaded_is_refused_and_the_node_lives(tmp_path: Path):
    async def scenario():
        async with scripted(tmp_path, **SOME) as head, rollout_daemon(head.address, head.key_file):
            await welcome(head)
            head.generate("wrong", version=3)
            failed = await head.expect(WeightsFailed)
            assert failed == WeightsFailed(3, "asked to generate with version 3, 0 is loaded")
            head.generate("right")
            await head.until_finished("right")
            assert not head.items("wrong")

    asyncio.run(scenario())


def test_hello_that_became_untrue_before_it_was_answered_is_said_again(tmp_path: Path):
    """The engine dies in between: what it held is told with the tokens that came, and aborted."""

    async def scenario():
        async with (
            scripted(tmp_path, **ENDLESS) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            hello = await head.ask_to_rejoin()
            assert hello.serves is not None
            [engine] = children_of(daemon.pid)
            os.kill(engine, signal.SIGKILL)
            await until_says(daemon, b"starting the engine again")
            since = len(head.heard)
            head.send(head.welcome)
            hello = await head.hello()
            assert hello.serves is None
            assert sorted(hello.running) == sorted((n, 1) for n in NAMES)
            head.send(head.welcome)
            await head.until_finished(*NAMES, since=since)
            for name in NAMES:
                [item] = head.items(name, since)
                assert (item.offset, item.finish_reason) == (0, "abort")
                _, tokens = joined([item])
                assert tokens
                assert tokens == head.expected(name, len(tokens))
            head.offer("a", 0)
            await head.expect(WeightsReady)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_patience_has_an_end(tmp_path: Path):
    async def scenario():
        node = {"heartbeat_s": 0.1, "patience_s": 3.0}
        async with (
            scripted(tmp_path, **ENDLESS, node=node) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            head.vanish()
            output, errors = await asyncio.wait_for(daemon.communicate(), DEADLINE_S)
            assert daemon.returncode == 1
            [line] = errors.decode().strip().splitlines()
            assert line.startswith("lightrl: ")
            assert "nothing received from the coordinator" in line
            assert b"Traceback" not in output

    asyncio.run(scenario())


@pytest.mark.e2e
def test_node_that_leaves_is_welcomed_once_more_to_say_what_it_holds(tmp_path: Path):
    async def scenario():
        async with (
            scripted(tmp_path, **ENDLESS) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            await head.ask_to_rejoin()
            since = len(head.heard)
            daemon.terminate()
            head.send(head.welcome)
            await head.expect(Drain)
            await head.until_finished(*NAMES, since=since)
            for name in NAMES:
                offset, tokens = joined(head.items(name, since))
                assert offset == 0
                assert tokens == head.expected(name, len(tokens))
            assert (await head.expect(Bye)).ok
            assert await asyncio.wait_for(daemon.wait(), DEADLINE_S) == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_node_leaves_within_its_grace_though_engine_and_coordinator_hang(tmp_path: Path):
    async def scenario():
        node = {"heartbeat_s": 0.1, "grace_s": 3.0}
        async with (
            scripted(tmp_path, **ENDLESS, node=node) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            [engine] = children_of(daemon.pid)
            os.kill(engine, signal.SIGSTOP)
            await head.ask_to_rejoin()  # and then silence
            began = time.monotonic()
            os.kill(daemon.pid, signal.SIGUSR1)
            assert await asyncio.wait_for(daemon.wait(), DEADLINE_S) in {0, 1}
            assert (
                time.monotonic() - began < 3.0 + 4.0
            )  # the interpreter's end included, on a busy machine

    asyncio.run(scenario())


@pytest.mark.e2e
def test_node_that_is_not_welcomed_at_all_can_be_told_to_leave(tmp_path: Path):
    async def scenario():
        async with (
            scripted(tmp_path, **SOME) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await head.hello()
            daemon.terminate()
            assert (await head.expect(Bye)).ok
            assert await asyncio.wait_for(daemon.wait(), DEADLINE_S) == 0

    asyncio.run(scenario())


def test_who_hangs_is_ended_by_force():
    code = (
        "import threading, time; from lightrl import log; "
        "from lightrl.daemon.parent import end_by_force; "
        "log.configure(log.LogSettings('rollout')); "
        "threading.Timer(0.1, end_by_force).start(); [None for _ in iter(lambda: time.sleep(1), 0)]"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert done.stdout.endswith(b" ERROR rollout : did not end in time: ended by force\n")


@pytest.mark.e2e
def test_engine_is_started_again_when_there_are_descriptors_for_it(tmp_path: Path):
    async def scenario():
        async with (
            scripted(tmp_path, **ENDLESS) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await welcome(head)
            head.generate(*NAMES)
            await some_tokens(head)
            _, hard = before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, hard))
            [engine] = children_of(daemon.pid)
            os.kill(engine, signal.SIGKILL)
            await until_says(
                daemon, b"the engine cannot be started: Too many open files; trying again"
            )
            await head.expect(WeightsFailed)
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
            head.offer("a", 0)
            await head.expect(WeightsReady)
            head.generate("next")
            await head.expect(TokenChunk, lambda c: c.responses[0].response == "next")

    asyncio.run(scenario())


@pytest.mark.e2e
def test_engine_that_is_killed_while_it_starts_is_started_again(tmp_path: Path):
    """Twice; whoever dies so three times in a row would do so again."""

    async def scenario():
        async with (
            scripted(tmp_path, **SOME) as head,
            rollout_daemon(head.address, head.key_file) as daemon,
        ):
            await head.hello()
            head.send(head.welcome)
            for _ in range(2):
                os.kill(await first_child(daemon.pid), signal.SIGKILL)
                await until_says(daemon, b"starting the engine again")
            head.offer("a", 0)
            await head.expect(WeightsReady)
            head.generate(*NAMES)
            await head.until_finished(*NAMES)

    asyncio.run(scenario())


async def first_child(pid: int) -> int:
    async with asyncio.timeout(DEADLINE_S):
        while not (children := children_of(pid)):  # noqa: ASYNC110 - a process tells nobody
            await asyncio.sleep(0.001)
    return children[0]


async def until_says(daemon: asyncio.subprocess.Process, words: bytes) -> None:
    assert daemon.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        while line := await daemon.stdout.readline():
            if words in line:
                return
    raise AssertionError(f"the daemon ended without saying {words!r}")


async def until_idle(daemon: int) -> None:
    """Its engine waits for orders."""
    [engine] = children_of(daemon)
    async with asyncio.timeout(DEADLINE_S):
        before = 0
        while True:
            if before == (before := num_switches(engine)):
                return
            await asyncio.sleep(0.3)  # a step of the engine takes a 60th of that


def num_switches(pid: int) -> int:
    """How often it was scheduled: a sleeping process is not."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
