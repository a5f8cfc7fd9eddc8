"""A reward pool that scores a list of responses with functions given as text."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

from lightrl.config import schema
from lightrl.rewards.protocol import RewardJob, RewardResult, RewardSet, WorkerSetup
from lightrl.rewards.runner import RewardPool

LETTERS = "abcdefghij"
LIMIT_S = 100.0  # of a whole scenario; generous, since test machines are slow


def job(name: str, text: str = "abc", attempt: int = 1, **row: Any) -> RewardJob:
    return RewardJob(
        name,
        attempt,
        "say abc",
        row,
        array("i", [1 + LETTERS.index(c) for c in text] + [0]),
        "stop",
    )


def reward_set(settings: schema.Reward, *columns: str, have_answers: bool = True) -> RewardSet:
    """Of prompts whose rows have these columns."""
    weights = settings.weights or (1.0,) * len(settings.functions)
    return RewardSet(settings.functions, weights, "prompt", "answer", columns, have_answers)


def run_jobs(
    source: str,
    jobs: list[RewardJob],
    model_files: Path,
    folder: Path,
    functions: tuple[str, ...] = ("reward",),
    as_group: bool = False,
    **reward: Any,
) -> dict[str, RewardResult]:
    """The results of all jobs, submitted at once, in the order in which they came. `as_group`: to
    be scored in one call."""
    (folder / "rewards.py").write_text(source)
    named = tuple(f"{folder}/rewards.py:{name}" for name in functions)
    settings = schema.Reward(functions=named, **reward)
    columns = sorted({name for j in jobs for name in j.row})
    results: dict[str, RewardResult] = {}

    async def scenario() -> None:
        done = asyncio.Event()

        def collect(result: RewardResult) -> None:
            assert result.response not in results
            results[result.response] = result
            if len(results) == len(jobs):
                done.set()

        sets = (reward_set(settings, *columns),)
        setup = WorkerSetup(settings.model_dump_json(), sets, str(model_files), num_steps=10)
        pool = RewardPool(settings, setup, folder, collect, print)
        async with asyncio.timeout(LIMIT_S):
            await pool.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pool.run())
                try:
                    for each in [jobs] if as_group else [[j] for j in jobs]:
                        pool.submit(*each)
                    await done.wait()
                finally:
                    await pool.stop()

    asyncio.run(scenario())
    return results
