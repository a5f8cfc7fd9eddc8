"""Episodes of real daemons, each of which is killed while the episodes are open. The kills at each
entry of the journal are in tests/environments/test_kills.py."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.keys import ENVIRONMENT_FILE
from lightrl.messages.training import TrainResponse
from tests.support.cli import linux_only
from tests.support.daemons import Running, a_run

pytestmark = [pytest.mark.usefixtures("warm_daemons"), linux_only]

FIVE = """
class Five:
    def reset(self, row, seed):
        self.seed, self.turn = seed, 0
        return f"{seed % 90}+1="

    def step(self, text):
        self.turn += 1
        return f"{self.seed % 9}+{len(text)}=", len(text) % 5 / 10, self.turn == 5
"""
Disturb = Callable[[Running], Awaitable[None]]


def sections(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "five.py").write_text(FIVE)
    five = {"source": f"{tmp_path / 'five.py'}:Five", "workers": 1, "max_length": 120}
    args = {"t0_ms": 4.0, "mean_length": 5.0, "restart_change": 0.0}
    return {
        "environment": five,
        "reward": {"functions": []},
        "rollout": {"engine_args": args, "max_response_length": 100},
    }


async def add_nodes(run: Running) -> None:
    await run.add_rollout("r")
    await add_environment(run)


async def add_environment(run: Running) -> None:
    run.join_file, before = run.config.run_dir / ENVIRONMENT_FILE, run.join_file
    await run.add_rollout("e", None, "--workers", "1")
    run.join_file = before


def trained(run: Running) -> dict[str, TrainResponse]:
    groups = [g for s in run.trainer.shards for g in s.groups]
    return {r.response: r for g in groups for r in g.responses}


async def to_the_end(run: Running) -> dict[str, TrainResponse]:
    await run.until_finished()
    assert run.head.succeeded
    return trained(run)


def undisturbed(tmp_path: Path) -> dict[str, TrainResponse]:
    tmp_path.mkdir()

    async def scenario() -> dict[str, TrainResponse]:
        async with a_run(tmp_path, **sections(tmp_path)) as run:
            await add_nodes(run)
            return await to_the_end(run)

    return asyncio.run(scenario())


def worker_of(pid: int) -> int:
    """The process of the environments below a daemon and its reaper."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[-1])
    return pid


def test_any_process_may_die_while_episodes_are_open(tmp_path: Path):
    async def more_tokens(run: Running, num: int = 60) -> None:
        least = run.head.snapshot().rollout_tokens + num
        await run.until(lambda s: s.rollout_tokens >= least)

    async def killed(run: Running, name: str) -> None:
        run.processes[name].kill()
        await run.processes[name].communicate()

    async def scenario() -> dict[str, TrainResponse]:
        config = sections(tmp_path)
        before = dict[str, TrainResponse]()
        async with a_run(tmp_path, **config) as run:
            await add_nodes(run)
            await more_tokens(run)
            os.kill(worker_of(run.processes["e"].pid), signal.SIGKILL)
            await more_tokens(run)
            await killed(run, "e")
            await add_environment(run)
            await more_tokens(run)
            await killed(run, "r")
            await run.add_rollout("r")
            await more_tokens(run)
            await run.silence()
            before = trained(run)
        async with a_run(tmp_path, resume=True, **config) as run:
            await add_nodes(run)
            return {**before, **await to_the_end(run)}

    whole = undisturbed(tmp_path / "undisturbed")
    assert len(whole) == 2 * 4 * 4
    assert asyncio.run(scenario()) == whole
