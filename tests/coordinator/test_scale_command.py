"""What `scale.command` may do wrong, with real processes: it costs a line each time."""

import asyncio
import contextlib
import os
import resource
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.scale import ScaleSection
from lightrl.coordinator.scale_command import ScaleCommand

DEADLINE_S = 60.0


class Scaled:
    """A command that runs, and the warnings about it; nobody joins."""

    def __init__(self, command: str, **settings: Any) -> None:
        self.warnings: list[str] = []
        self.num_there = 0
        self._warned = asyncio.Event()
        defaults = {"max": 100, "every_s": 0.05, "timeout_s": DEADLINE_S}
        section = ScaleSection(command=command, **{**defaults, **settings})
        self.command = ScaleCommand(section, lambda: self.num_there, self._warn)

    def _warn(self, line: str) -> None:
        assert "\n" not in line
        self.warnings.append(line)
        self._warned.set()

    async def warned(self, count: int = 1) -> list[str]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.warnings) < count:
                await self._warned.wait()
                self._warned.clear()
        return self.warnings


@contextlib.asynccontextmanager
async def scaled(command: str, **settings: Any) -> AsyncIterator[Scaled]:
    made = Scaled(command, **settings)
    running = asyncio.create_task(made.command.run())
    try:
        yield made
        assert not running.done()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def script(folder: Path, *lines: str) -> str:
    file = folder / "scale"
    file.write_text("\n".join(("#!/bin/sh", *lines, "")))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


async def line_of(fifo: int) -> str:
    """What somebody writes next into a pipe with a name."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fifo, ready.set)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await ready.wait()
                ready.clear()
                if data := os.read(fifo, 4096):
                    return data.decode().strip()
    finally:
        loop.remove_reader(fifo)


@pytest.fixture
def fifo(tmp_path: Path):
    os.mkfifo(tmp_path / "said")
    descriptor = os.open(tmp_path / "said", os.O_RDWR | os.O_NONBLOCK)  # never at its end
    yield descriptor
    os.close(descriptor)


def test_it_gets_the_number_as_its_last_word_and_no_key(
    tmp_path: Path, fifo: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LIGHTRL_KEY", "secret")
    said = 'echo "$1|$2|$3|$LIGHTRL_WANTED|$LIGHTRL_KEY|$SHELL_OF" > "$(dirname "$0")/said"'
    monkeypatch.setenv("SHELL_OF", "mine")

    async def scenario() -> None:
        async with scaled(f"{script(tmp_path, said)} --to 'a b'") as s:
            s.command.want(7)
            assert await line_of(fifo) == "--to|a b|7|7||mine"

    asyncio.run(scenario())


def test_of_numbers_that_come_while_it_runs_the_last_one_counts_and_it_never_runs_twice(
    tmp_path: Path, fifo: int
):
    # says that it has begun, and ends when it is let
    os.mkfifo(tmp_path / "go")
    lines = ('cd "$(dirname "$0")"', "mkdir running || echo twice > said", "echo $1 > said")
    command = script(tmp_path, *lines, "read _ < go", "rmdir running")

    async def scenario() -> None:
        go = os.open(tmp_path / "go", os.O_RDWR)
        async with scaled(command, every_s=0.3) as s:
            began = time.monotonic()
            s.command.want(1)
            assert await line_of(fifo) == "1"
            for number in (2, 3, 4):
                s.command.want(number)
            os.write(go, b"\n")
            assert await line_of(fifo) == "4"
            assert time.monotonic() - began >= 0.3
            os.write(go, b"\n")
            assert (await s.warned())[0].startswith("scale.command for 4 nodes: 0 preemptible")
        os.close(go)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("/nowhere/scale", "cannot be started: No such file or directory"),
        ("{folder}", "cannot be started: Permission denied"),
        ("{folder}/plain", "cannot be started: Permission denied"),
        ("{folder}/nonsense", "cannot be started: Exec format error"),
        ("sh -c 'echo one; echo two >&2; exit 3'", "failed (status 3): two"),
        ("sh -c 'kill -9 $$'", "failed (killed by SIGKILL)"),
        (r"sh -c 'printf \"\\033[2Jx\"; exit 1'", "failed (status 1): "),
    ],
)
def test_what_cannot_run_or_fails_costs_one_line(tmp_path: Path, command: str, text: str):
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "nonsense").write_bytes(b"\x00\x01")
    (tmp_path / "nonsense").chmod(0o755)

    async def scenario() -> None:
        async with scaled(command.format(folder=tmp_path)) as s:
            s.command.want(2)
            [line] = await s.warned()
            assert line.startswith(f"scale.command for 2 nodes {text}")
            assert line.isprintable()
            s.command.want(3)
            assert (await s.warned(2))[1].startswith(f"scale.command for 3 nodes {text}")

    asyncio.run(scenario())


def test_what_failed_is_tried_again_and_the_same_reason_is_said_once(tmp_path: Path, fifo: int):
    lines = ('cd "$(dirname "$0")"', "echo x >> tried", "test $(wc -l < tried) -ge 4 || exit 1")

    async def scenario() -> None:
        async with scaled(script(tmp_path, *lines, "echo $1 > said")) as s:
            s.num_there = 2
            s.command.want(2)
            assert await line_of(fifo) == "2"
            assert s.warnings == ["scale.command for 2 nodes failed (status 1)"]

    asyncio.run(scenario())


def test_one_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path, fifo: int):
    lines = ('cd "$(dirname "$0")"', "sleep 1000 &", "echo $! > said", "trap '' TERM", "wait")

    async def scenario() -> None:
        async with scaled(script(tmp_path, *lines), timeout_s=1.0) as s:
            s.command.want(5)
            child = int(await line_of(fifo))
            [line] = await s.warned()
            assert line == (
                "scale.command for 5 nodes was killed: it had not ended after scale.timeout_s = 1"
            )
            await gone(child)

    asyncio.run(scenario())


def test_one_that_runs_when_the_run_ends_is_killed(tmp_path: Path, fifo: int):
    lines = ('cd "$(dirname "$0")"', "sleep 1000 &", "echo $! > said", "wait")

    async def scenario() -> None:
        async with scaled(script(tmp_path, *lines)) as s:
            s.command.want(5)
            child = int(await line_of(fifo))
        await gone(child)

    asyncio.run(scenario())


async def gone(pid: int) -> None:
    """Killed; whoever inherited it may not have waited for it yet."""
    async with asyncio.timeout(DEADLINE_S):
        while (state := _state(pid)) not in {"", "Z"}:
            assert state != "T"
            await asyncio.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_what_it_leaves_running_in_order_goes_on(tmp_path: Path, fifo: int):
    lines = ('cd "$(dirname "$0")"', "sleep 1000 &", "echo $! > said")

    async def scenario() -> None:
        async with scaled(script(tmp_path, *lines)) as s:
            s.num_there = 1
            s.command.want(1)
            child = int(await line_of(fifo))
            s.num_there = 2
            assert "2 preemptible nodes are here" in (await s.warned())[0]
            assert _state(child) in {"S", "R", "D"}  # it may still be on its way to sleep
            os.kill(child, 9)

    asyncio.run(scenario())


def test_output_without_end_takes_neither_memory_nor_the_loop(tmp_path: Path):
    async def scenario() -> None:
        async with scaled("sh -c 'yes | head -c 300000000; echo last >&2; exit 1'") as s:
            before = resource.getrusage(resource.RUSAGE_SELF)
            s.command.want(1)
            lines = await s.warned()
            after = resource.getrusage(resource.RUSAGE_SELF)
            assert lines == ["scale.command for 1 nodes failed (status 1): last"]
            assert after.ru_maxrss - before.ru_maxrss < 64 << 10  # KiB
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert cpu_s < 5.0

    asyncio.run(scenario())


@pytest.mark.parametrize("there", [0, 3, 9])
def test_nodes_that_do_not_come_or_are_too_many_cost_one_line(there: int):
    async def scenario() -> None:
        async with scaled("true") as s:
            s.num_there = there
            s.command.want(4)
            [line] = await s.warned()
            assert f"for 4 nodes: {there} preemptible nodes are here" in line
            assert "--preemptible" in line

    asyncio.run(scenario())
