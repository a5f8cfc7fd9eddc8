"""The daemons of a run whose directory refuses what a daemon needs."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from lightrl.client import ask
from lightrl.keys import new_key, write_keys
from lightrl.launch.daemons import Daemon, RunFailed
from lightrl.launch.local import LocalRun
from lightrl.messages.nodes import Role
from tests.support.daemons import make_config

LIMIT_S = 90.0
REFUSED = "^head cannot be started: No such file or directory$"


def run_without_logs(tmp_path: Path, told: list[str]) -> LocalRun:
    config = make_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    write_keys(config.run_dir)
    return LocalRun(config, resume=True, report=told.append)


def test_a_daemon_whose_log_cannot_be_opened_fails_the_run_in_one_line(tmp_path):
    local = run_without_logs(tmp_path, [])

    async def story() -> None:
        async with asyncio.timeout(LIMIT_S):
            await local.start()

    with pytest.raises(RunFailed, match=REFUSED):
        asyncio.run(story())


def test_a_daemon_that_cannot_be_started_again_fails_the_run_in_one_line(tmp_path):
    told: list[str] = []
    local = run_without_logs(tmp_path, told)

    async def story() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import signal; signal.pause()"
        )
        process.send_signal(signal.SIGKILL)
        ended = asyncio.create_task(process.wait())
        log = local.run_dir / "logs" / "head.log"
        local.daemons.by_name["head"] = Daemon("head", "coordinator", process, log, 0, ended)
        async with asyncio.timeout(LIMIT_S):
            await local.until_over()

    with pytest.raises(RunFailed, match=REFUSED):
        asyncio.run(story())
    assert [line.partition(" (")[0] for line in told] == ["head was killed by SIGKILL"]


def test_nobody_waits_for_the_answer_of_a_coordinator_that_has_ended(tmp_path, monkeypatch):
    """Asked whether it misses a trainer that left in order, it ends before it answers."""
    monkeypatch.setattr(ask, "ANSWER_S", 10 * LIMIT_S)
    local = run_without_logs(tmp_path, [])
    asked, over = asyncio.Event(), asyncio.Event()
    local.key = new_key()

    async def daemon(name: str, role: Role, program: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE)
        ended = asyncio.create_task(process.wait())
        local.daemons.by_name[name] = Daemon(
            name, role, process, tmp_path / f"{name}.log", 0, ended
        )
        return process

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await over.wait()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        local.address = f"tcp://{host}:{port}"
        head = await daemon("head", "coordinator", "input()")
        await daemon("trainer-0", "trainer", "pass")
        async with asyncio.timeout(LIMIT_S):
            living = asyncio.create_task(local.until_over())
            await asked.wait()
            assert head.stdin is not None
            head.stdin.write(b"\n")
            await living
        over.set()
        head.stdin.close()
        await head.stdin.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(story())
