"""A rollout node that gives its devices back and gets them again: every token is said first, an
engine is there only while the devices are its own, and who orders it is told what came of it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.messages.nodes import Bye, Drain, Welcome
from lightrl.messages.responses import Abort, TokenChunk
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.weights import WeightsFailed, WeightsReady
from tests.daemon.test_reconnect import NAMES, scripted, some_tokens, until_says
from tests.daemon.test_runs import children_of
from tests.support.daemons import DEADLINE_S
from tests.support.scripted_coordinator import ScriptedHead, joined, rollout_daemon

pytestmark = pytest.mark.usefixtures("warm_daemons")

MAX_TOKENS = 50_000
Node = tuple[ScriptedHead, asyncio.subprocess.Process]


@contextlib.asynccontextmanager
async def shared_node(
    tmp_path: Path, grace_s: float = 60.0, patience_s: float = 60.0, **args: float
) -> AsyncIterator[Node]:
    """Welcomed; it begins as released. `args` are those of its engine, see emulation.py."""
    engine_args = {"t0_ms": 5.0, "mean_length": 0.0, "sleep_mb": 14.8} | args
    changes: dict[str, Any] = {
        "rollout": {
            "engine_args": engine_args,
            "max_response_length": MAX_TOKENS,
            "placement": "shared",
        },
        "train": {"max_tokens_per_gpu": 60_000},
        "node": {"heartbeat_s": 0.1, "grace_s": grace_s, "patience_s": patience_s},
    }
    async with (
        scripted(tmp_path, **changes) as head,
        rollout_daemon(head.address, head.key_file, "--shares", "trainer-0") as daemon,
    ):
        hello = await head.hello()
        assert (hello.shares, hello.is_released, hello.serves) == ("trainer-0", True, None)
        head.send(head.welcome)
        yield head, daemon


@contextlib.asynccontextmanager
async def awake_node(tmp_path: Path, **args: float) -> AsyncIterator[Node]:
    """It serves version 0; the next number of an order is 1."""
    async with shared_node(tmp_path, **args) as (head, daemon):
        head.offer("a", 0)
        await wake(head, 0, 0)
        yield head, daemon


async def wake(head: ScriptedHead, number: int, version: int) -> None:
    head.send(SetDevices("rollout", number, True))
    assert (await head.expect(WeightsReady)).policy_version == version


async def release(head: ScriptedHead, number: int) -> DevicesReleased:
    head.send(SetDevices("rollout", number, False))
    released = await head.expect(DevicesReleased)
    assert released.number == number
    return released


async def one_engine(daemon: asyncio.subprocess.Process) -> int:
    """Its process id, once it is there."""
    [engine] = await until_children(daemon, 1)
    return engine


async def until_children(daemon: asyncio.subprocess.Process, num: int) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if len(found := children_of(daemon.pid)) == num:
                return found
            await asyncio.sleep(0.01)


@pytest.mark.e2e
def test_no_engine_is_started_before_the_devices_are_its_own(tmp_path: Path):
    async def scenario():
        async with shared_node(tmp_path) as (head, daemon):
            head.offer("a", 0)
            assert await release(head, 5) == DevicesReleased("rollout", 5, 0, 0.0)
            assert children_of(daemon.pid) == []
            await wake(head, 6, 0)
            await one_engine(daemon)

    asyncio.run(scenario())


def test_the_last_tokens_are_said_before_it_is_released_and_go_on_under_the_same_version(
    tmp_path: Path,
):
    async def scenario():
        async with awake_node(tmp_path) as (head, daemon):
            engine = await one_engine(daemon)
            head.generate(*NAMES)
            await some_tokens(head)
            released = await release(head, 1)
            assert released.num_bytes == 14_800_000
            held = {}
            for name in NAMES:
                items = head.items(name)
                assert items[-1].finish_reason == "abort"
                _, held[name] = joined(items)
                assert held[name] == head.expected(name, len(held[name]))
            head.generate("late")  # it was on its way when the node was told
            since = len(head.heard)
            await wake(head, 2, 0)
            assert not any(isinstance(m, TokenChunk) for m in head.heard[since:])
            assert await one_engine(daemon) == engine
            name = NAMES[0]
            head.generate(name, attempt=2, prefix=len(held[name]))
            await head.expect(TokenChunk)
            offset, tokens = joined(head.items(name, since))
            assert offset == len(held[name])
            assert held[name] + tokens == head.expected(name, offset + len(tokens))
            assert not head.items("late")

    asyncio.run(scenario())


def test_a_version_that_is_published_meanwhile_is_fetched_and_loaded_when_it_wakes(tmp_path: Path):
    async def scenario():
        async with awake_node(tmp_path) as (head, _):
            await release(head, 1)
            file = head.offer("a", 1)
            hello = await head.ask_to_rejoin()
            assert (hello.serves, hello.is_released) == (None, True)
            head.send(head.welcome)
            assert (await release(head, 2)).num_bytes == 14_800_000  # it still sleeps
            head.send(SetDevices("rollout", 3, True))
            ready = await head.expect(WeightsReady)
            assert (ready.policy_version, ready.digest) == (1, file.digest)
            assert ready.load_s > 0
            readies = [m.policy_version for m in head.heard if isinstance(m, WeightsReady)]
            assert readies == [0, 1]

    asyncio.run(scenario())


@pytest.mark.e2e
def test_orders_that_come_twice_or_late_or_crosswise(tmp_path: Path):
    async def scenario():
        async with awake_node(tmp_path, sleep_ms=200.0) as (head, _):
            head.send(SetDevices("rollout", 3, False))
            first = await release(head, 3)
            again = await release(head, 3)
            assert (first.seconds >= 0.2, again.seconds) == (True, 0.0)
            head.send(SetDevices("rollout", 1, False))  # late
            await wake(head, 4, 0)
            head.send(SetDevices("rollout", 4, True))
            await head.expect(WeightsReady)  # it serves
            assert {m.number for m in head.heard if isinstance(m, DevicesReleased)} == {3}
            since = len(head.heard)
            head.send(SetDevices("rollout", 5, False))
            await wake(head, 6, 0)  # before it was released: one after the other
            assert not any(isinstance(m, DevicesReleased) for m in head.heard[since:])
            await release(head, 7)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_loads_a_version_sleeps_when_it_has_it(tmp_path: Path):
    async def scenario():
        async with awake_node(tmp_path, load_ms=1000.0) as (head, _):
            head.offer("a", 1)
            while (await head.ask_to_rejoin()).serves is not None:  # it does not load yet
                head.send(head.welcome)
            head.send(head.welcome)
            head.send(SetDevices("rollout", 1, False))
            assert (await head.expect(WeightsReady)).policy_version == 1
            assert (await head.expect(DevicesReleased)).number == 1

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_does_not_sleep_in_time_is_killed_and_its_devices_are_free(tmp_path: Path):
    async def scenario():
        async with awake_node(tmp_path, grace_s=0.8) as (head, daemon):
            engine = await one_engine(daemon)
            head.generate(*NAMES)
            await some_tokens(head)
            os.kill(engine, signal.SIGSTOP)
            released = await release(head, 1)
            assert released.num_bytes == 0
            assert 0.8 <= released.seconds < DEADLINE_S
            assert children_of(daemon.pid) == []
            assert not any(isinstance(m, WeightsFailed) for m in head.heard)
            await wake(head, 2, 0)
            head.generate("next")
            await head.expect(TokenChunk, lambda m: m.responses[-1].response == "next")

    asyncio.run(scenario())


STARTS = b"the engine still starts: its devices are given back once it is up"


@pytest.mark.e2e
def test_an_engine_that_still_starts_gets_up_and_then_sleeps_at_once(tmp_path: Path):
    async def scenario():
        async with shared_node(tmp_path, grace_s=0.2, start_ms=2000.0) as (head, daemon):
            head.offer("a", 0)
            head.send(SetDevices("rollout", 0, True))
            engine = await one_engine(daemon)
            head.send(SetDevices("rollout", 1, False))
            await until_says(daemon, STARTS)
            released = await head.expect(DevicesReleased)
            assert (released.number, released.num_bytes) == (1, 14_800_000)
            assert released.seconds > 0.2
            assert not any(isinstance(m, WeightsReady) for m in head.heard)
            await wake(head, 2, 0)
            assert await one_engine(daemon) == engine

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_start_that_hangs_is_cut_short_in_the_end(tmp_path: Path):
    async def scenario():
        async with shared_node(tmp_path, patience_s=1.5, start_ms=60_000.0) as (head, daemon):
            head.send(SetDevices("rollout", 0, True))
            await one_engine(daemon)
            released = await release(head, 1)
            assert released.num_bytes == 0
            assert released.seconds >= 1.5
            assert children_of(daemon.pid) == []

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_dies_asleep_is_started_when_it_is_woken_and_after_the_second_never(
    tmp_path: Path,
):
    async def scenario():
        async with awake_node(tmp_path) as (head, daemon):
            for number in (1, 3):
                await release(head, number)
                os.kill(await one_engine(daemon), signal.SIGKILL)
                await until_children(daemon, 0)
                if number == 1:
                    await release(head, 2)  # it has seen it, and still has none
                    assert children_of(daemon.pid) == []
                    await wake(head, 2, 0)
            await until_says(daemon, b"its devices only train")
            head.skip()
            head.send(SetDevices("rollout", 4, True))
            failed = await head.expect(WeightsFailed)
            assert "engines here do not wake, so its devices only train" in failed.reason
            assert "killed by SIGKILL" in failed.reason
            head.offer("a", 1)
            assert (await head.expect(WeightsFailed)).policy_version == 1
            hello = await head.ask_to_rejoin()
            assert (hello.is_released, hello.serves) == (True, None)
            assert children_of(daemon.pid) == []

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_dies_while_it_wakes_is_started_again_at_once(tmp_path: Path):
    async def scenario():
        async with awake_node(tmp_path, wake_ms=60_000.0) as (head, daemon):
            await release(head, 1)
            head.send(SetDevices("rollout", 2, True))
            engine = await one_engine(daemon)
            hello = await head.ask_to_rejoin()
            assert (hello.is_released, hello.serves) == (False, None)
            head.send(head.welcome)
            os.kill(engine, signal.SIGKILL)
            failed = await head.expect(WeightsFailed)
            assert "killed by SIGKILL" in failed.reason
            head.offer("a", 1)
            assert (await head.expect(WeightsReady)).policy_version == 1  # it never slept
            assert await one_engine(daemon) != engine

    asyncio.run(scenario())


def test_a_coordinator_that_missed_the_release_hears_of_it(tmp_path: Path):
    """It has taken the node in as one that has its devices: what it ordered before may have been
    forgotten with it."""

    async def scenario():
        async with awake_node(tmp_path, sleep_ms=1000.0) as (head, _):
            head.generate(*NAMES)
            await some_tokens(head)
            head.send(SetDevices("rollout", 7, False))
            await head.until_finished(*NAMES)
            hello = await head.ask_to_rejoin()
            assert not hello.is_released
            head.send(head.welcome)
            hello = await head.hello()
            assert (hello.is_released, hello.serves) == (True, None)
            assert sorted(hello.running) == sorted((n, 1) for n in NAMES)  # their ends come again
            since = len(head.heard)
            head.send(head.welcome)
            await head.until_finished(*NAMES, since=since)
            assert not any(isinstance(m, DevicesReleased) for m in head.heard)
            await wake(head, 0, 0)  # it counts anew

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_node_that_sleeps_can_be_sent_away(tmp_path: Path):
    async def scenario():
        async with awake_node(tmp_path) as (head, daemon):
            await release(head, 1)
            head.send(Abort(((NAMES[0], 1),)))
            head.send(Drain("a", "enough"))
            bye = await head.expect(Bye)
            assert (bye.reason, bye.ok) == ("enough", True)
            async with asyncio.timeout(DEADLINE_S):
                assert await daemon.wait() == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_node_with_devices_of_its_own_keeps_them(tmp_path: Path):
    async def scenario():
        async with scripted(tmp_path) as head, rollout_daemon(head.address, head.key_file):
            hello = await head.hello()
            assert (hello.shares, hello.is_released) == ("", False)
            head.send(head.welcome)
            head.offer("a", 0)
            await head.expect(WeightsReady)
            head.send(SetDevices("rollout", 1, False))
            head.generate("r")
            await head.until_finished("r")
            assert not any(isinstance(m, DevicesReleased) for m in head.heard)

    asyncio.run(scenario())


STRANGER = "shares the devices of nobody, which is no trainer node of this run"


@pytest.mark.e2e
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
def test_one_that_shares_with_nobody_says_so_and_ends(tmp_path: Path, is_late: bool):
    """Later: it was welcomed while a trainer node was missing, which could have been the one."""

    async def scenario():
        async with (
            scripted(tmp_path, rollout={"placement": "shared"}) as head,
            rollout_daemon(head.address, head.key_file, "--shares", "nobody") as daemon,
        ):
            await head.hello()
            if is_late:
                head.send(head.welcome)
            head.send(Welcome("", refused=STRANGER))
            bye = await head.expect(Bye)
            assert not bye.ok
            async with asyncio.timeout(DEADLINE_S):
                out, errors = await daemon.communicate()
            said = (out + errors).decode()
            line = f"the coordinator refuses this node: {STRANGER}"
            assert (daemon.returncode, said.count(f"{line}\n")) == (1, 1)
            assert "Traceback" not in said
            assert "disconnected" not in said

    asyncio.run(scenario())


@pytest.mark.e2e
def test_to_share_in_a_run_where_nothing_is_shared_is_refused(tmp_path: Path):
    async def scenario():
        async with (
            scripted(tmp_path) as head,
            rollout_daemon(head.address, head.key_file, "--shares", "trainer-0") as daemon,
        ):
            await head.hello()
            head.send(head.welcome)
            bye = await head.expect(Bye)
            assert not bye.ok
            assert bye.reason == (
                "--shares trainer-0: in this run no devices are shared: rollout.placement = 'own'"
            )
            assert await daemon.wait() == 1

    asyncio.run(scenario())
