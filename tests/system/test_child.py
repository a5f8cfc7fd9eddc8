"""A child process and its pipe: how it is stopped, and what does not end it."""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightrl.system import child as child_module
from lightrl.system.child import Child, ChildDied, Pipe, retry_on_resource_limit
from lightrl.system.timeouts import CHECKS
from lightrl.wire import Codec

LIMIT_S = 90.0  # of a whole scenario


@dataclass(frozen=True)
class Say:
    data: bytes


@dataclass(frozen=True)
class End:
    code: int


@dataclass(frozen=True)
class Said:
    data: bytes


@dataclass(frozen=True)
class Ready:
    pass


COMMANDS: Codec[Say | End] = Codec(Say | End)
EVENTS: Codec[Said | Ready] = Codec(Said | Ready)


def echo(sock):
    pipe = Pipe(sock, COMMANDS, EVENTS)
    pipe.send(Ready())
    with contextlib.suppress(EOFError):
        while True:
            for command in pipe.receive():
                if isinstance(command, End):
                    sys.exit(command.code)
                pipe.send(Said(command.data))


def never_read(sock):
    Pipe(sock, COMMANDS, EVENTS).send(Ready())
    while True:
        signal.pause()


def terminate_helpers(sock):
    """As user code does it: a program and a forked worker, both ended with SIGTERM."""
    program = subprocess.Popen(["sleep", "60"])
    worker = multiprocessing.get_context("fork").Process(target=signal.pause)
    worker.start()
    program.terminate()
    worker.terminate()
    worker.join()
    Pipe(sock, COMMANDS, EVENTS).send(Said(f"{program.wait()} {worker.exitcode}".encode()))


@contextlib.asynccontextmanager
async def child(target: str) -> AsyncIterator[Child]:
    places = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))  # which scripts/mutate sets
    tests = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    process = await Child.start(f"test_child:{target}", target, COMMANDS, EVENTS, env=tests)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield process
    finally:
        process.kill()
        await process.stop()


def test_frames_of_any_size_arrive_whole_and_in_order():
    async def scenario() -> None:
        async with child("echo") as process:
            assert await process.receive() == Ready()
            sent = [bytes([i]) * size for i, size in enumerate((0, 1, 3 << 20, 17))]
            for data in sent:
                process.send(Say(data))
            assert [await process.receive() for _ in sent] == [Said(data) for data in sent]
            assert await process.stop() == 0

    asyncio.run(scenario())


def test_a_parent_that_leaves_without_reading_is_gone_in_order():
    """The kernel then resets the connection, which is no failure of the child."""
    ours, theirs = socket.socketpair()
    with theirs:
        pipe = Pipe(theirs, COMMANDS, EVENTS)
        pipe.send(Ready())
        ours.close()
        with pytest.raises(EOFError, match="the parent closed the pipe"):
            pipe.receive()


def test_what_lies_in_the_working_directory_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("queue", "ctypes", "lightrl"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")

    async def scenario() -> None:
        async with child("echo") as process:
            assert await process.receive() == Ready()

    asyncio.run(scenario())


def test_the_exit_reason_names_the_exit_status():
    async def scenario() -> None:
        async with child("echo") as process:
            process.send(End(7))
            assert await process.receive() == Ready()
            with pytest.raises(ChildDied, match=r"echo \(pid \d+\) ended with exit status 7"):
                await process.receive()

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(4))
def test_a_cancel_about_when_the_child_ends_is_not_lost(turns, monkeypatch):
    """Else whoever starts it again would go on to do so, after it was told to stop."""

    async def scenario() -> None:
        async with child("echo") as process:
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            is_awaited = asyncio.Event()

            async def wait() -> int:
                is_awaited.set()
                return await ended

            with monkeypatch.context() as scripted:
                scripted.setattr(process._process, "wait", wait)
                process.send(End(7))
                assert await process.receive() == Ready()
                receiving = asyncio.create_task(process.receive())
                await is_awaited.wait()
                ended.set_result(7)
                for _ in range(turns):
                    await asyncio.sleep(0)
                expected = asyncio.CancelledError if receiving.cancel() else ChildDied
                with pytest.raises(expected):
                    await receiving

    asyncio.run(scenario())


def test_a_child_that_never_reads_is_killed_when_the_grace_is_over():
    async def scenario() -> None:
        async with child("never_read") as process:
            assert await process.receive() == Ready()
            process.send(Say(bytes(8 << 20)))  # more than the socket takes
            assert await process.stop(grace_s=0.1) == -signal.SIGKILL

    asyncio.run(scenario())


def test_a_child_that_owes_an_answer_and_is_silent_is_given_up():
    """Not while it owes nothing, and not for a gap that it has ended."""

    async def scenario() -> None:
        async with child("echo") as process:
            assert await process.receive() == Ready()
            looks: list[bool] = []

            def owes() -> bool:
                looks.append(len(looks) != 20 and len(looks) >= 2 * CHECKS)
                return looks[-1]

            with pytest.raises(ChildDied, match=r"echo \(pid \d+\) hangs: no answer for 0\.01 s"):
                await process.require_answers(owes, 0.01)
            assert len(looks) == 21 + CHECKS

    asyncio.run(scenario())


def test_a_child_that_answers_now_and_then_is_not_given_up():
    async def scenario() -> None:
        async with child("echo") as process:
            num_looks = 0

            def owes() -> bool:
                nonlocal num_looks
                num_looks += 1
                process._num_received += num_looks in {CHECKS, 2 * CHECKS - 1}
                return True

            with pytest.raises(ChildDied, match="hangs"):
                await process.require_answers(owes, 0.01)
            assert num_looks == 3 * CHECKS - 1

    asyncio.run(scenario())


def test_a_cancelled_stop_leaves_no_child_behind():
    async def scenario() -> None:
        async with child("never_read") as process:
            assert await process.receive() == Ready()
            stopping = asyncio.create_task(process.stop(grace_s=LIMIT_S))
            await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            with pytest.raises(ChildDied, match=r"killed by SIGKILL|closed its pipe"):
                await process.receive()

    asyncio.run(scenario())


def test_signals_that_are_for_the_daemon_do_not_end_a_child():
    async def scenario() -> None:
        async with child("echo") as process:
            assert await process.receive() == Ready()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.killpg(process.pid, number)
                process.send(Say(b"still there"))
                assert await process.receive() == Said(b"still there")
            assert await process.stop() == 0  # the closed pipe does

    asyncio.run(scenario())


def test_helpers_of_user_code_still_heed_sigterm():
    async def scenario() -> None:
        async with child("terminate_helpers") as process:
            assert await process.receive() == Said(f"{-signal.SIGTERM} {-signal.SIGTERM}".encode())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "lack", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]
)
def test_what_this_machine_lacks_now_is_waited_for(lack, monkeypatch):
    monkeypatch.setattr(child_module, "START_AGAIN_S", 0)
    told: list[str] = []
    errors = [lack, lack]

    async def start() -> str:
        if errors:
            raise errors.pop()
        return "started"

    assert asyncio.run(retry_on_resource_limit(start, "it", told.append)) == "started"
    reason = str(lack).removeprefix(f"[Errno {errno.EMFILE}] ")
    assert told == [f"it cannot be started: {reason}; trying again"]


def test_any_other_error_is_not_waited_out():
    async def start() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(retry_on_resource_limit(start, "it", pytest.fail))
