"""The daemons of a run whose directory refuses what a daemon needs."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from lightrl.keys import write_keys
from lightrl.launch.daemons import Daemon, RunFailed
from lightrl.launch.local import LocalRun
from tests.support.daemons import make_config

LIMIT_S = 30.0
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
        local.daemons["head"] = Daemon("head", "coordinator", process, log, 0, ended)
        async with asyncio.timeout(LIMIT_S):
            await local.until_over()

    with pytest.raises(RunFailed, match=REFUSED):
        asyncio.run(story())
    assert [line.partition(" (")[0] for line in told] == ["head was killed by SIGKILL"]
