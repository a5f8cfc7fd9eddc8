"""Times of right answers belong to the run: each worker is given the same, also after a resume."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lightrl.metrics.sinks import read
from tests.daemon.test_runs import busy
from tests.support.daemons import a_run

pytestmark = pytest.mark.usefixtures("warm_daemons")

REWARD = """
def reward(sample):
    given = -1.0 if sample.slowest_s is None else sample.slowest_s
    return {"reward": 1.0, "slowest_s": 4.0, "given": given}
"""


def changes(tmp_path: Path, **run: Any) -> dict[str, dict[str, Any]]:
    """Each step has all four prompts."""
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = ({"prompt": f"{i}%3=", "answer": "1"} for i in range(40, 44))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "run": run,
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "rollout": {"engine_args": {"t0_ms": 10.0, "mean_length": 0.0}},
        "reward": {"functions": f"{tmp_path}/rewards.py:reward", "workers": 3},
        "train": {"steps": 3, "prompts_per_step": 4},
    }


def given(tmp_path: Path) -> list[float]:
    return [record["reward/given"] for record in read(tmp_path / "test")]


def test_all_workers_are_given_the_times_of_the_run_and_after_a_resume_too(tmp_path: Path):
    async def scenario():
        settings = changes(tmp_path)
        async with a_run(tmp_path, **settings) as run:
            await run.add_rollout("a")
            await run.until(lambda s: s.step == 1 and busy(s, "a"))
            await run.silence()
        async with a_run(tmp_path, resume=True, **settings) as run:
            run.trainer.begins_at = 1
            await run.add_rollout("b")
            await run.until_finished()
            assert run.head.succeeded
            assert set(run.head._core.lifecycle.slowest_s.values()) == {4.0}

    asyncio.run(scenario())
    first, *later = given(tmp_path)
    assert first < 4.0  # at least the first answer to each prompt knew no other
    assert later == [4.0, 4.0]


@pytest.mark.e2e
def test_a_deterministic_run_gives_none(tmp_path: Path):
    async def scenario():
        async with a_run(tmp_path, **changes(tmp_path, deterministic=True)) as run:
            await run.add_rollout("a")
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())
    assert given(tmp_path) == [-1.0, -1.0, -1.0]
