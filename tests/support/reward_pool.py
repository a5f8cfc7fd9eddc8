"""A reward pool that scores a list of responses with functions given as text."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

from lightrl import config
from lightrl.rewards.runner import RewardJob, RewardPool, RewardResult

LETTERS = "abcdefghij"
LIMIT_S = 40.0  # of a whole scenario; generous, since test machines are slow


def job(name: str, text: str = "abc", attempt: int = 1, **row: Any) -> RewardJob:
    return RewardJob(
        name,
        attempt,
        "say abc",
        row,
        array("i", [1 + LETTERS.index(c) for c in text] + [0]),
        "stop",
    )


def run_jobs(
    source: str, jobs: list[RewardJob], model_files: Path, folder: Path, **reward: Any
) -> dict[str, RewardResult]:
    """The results of all jobs, submitted at once, in the order in which they came."""
    (folder / "rewards.py").write_text(source)
    settings = config.Reward(functions=(f"{folder}/rewards.py:reward",), **reward)
    results: dict[str, RewardResult] = {}

    async def scenario() -> None:
        done = asyncio.Event()

        def collect(result: RewardResult) -> None:
            assert result.response not in results
            results[result.response] = result
            if len(results) == len(jobs):
                done.set()

        pool = RewardPool(settings, model_files, "answer", folder, collect, print)
        async with asyncio.timeout(LIMIT_S):
            await pool.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pool.run())
                try:
                    for j in jobs:
                        pool.submit(j)
                    await done.wait()
                finally:
                    await pool.stop()

    asyncio.run(scenario())
    return results
