"""The data read and the reward functions tried as the beginning of a run would, without a run: for
`lightrl up --dry-run` and `lightrl check`.

The rows, the worker process and what is concluded are those of a run; only the lines are made here.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.coordinator.first_rows import first_rows
from lightrl.coordinator.prompts import Prompts
from lightrl.coordinator.scoring import require_whole_groups
from lightrl.errors import DataUnreachable, RewardError, first_error
from lightrl.rewards.jobs import RewardResult
from lightrl.rewards.runner import RewardPool
from lightrl.rewards.trial import Trials, Tried, doubts
from lightrl.system.temporary import temporary_folder


def try_rewards(config: Config) -> tuple[list[Tried], list[str]]:
    """The results of the first row of each set, those of the evaluation last; and notes on the
    prompts, in lines.

    Raises ConfigError, DataError or RewardError, one line, for what a run would not begin with.
    """
    prompts = Prompts(config)
    try:
        with temporary_folder("check") as folder:
            return asyncio.run(_try_rows(config, prompts, folder)), prompts.notes()
    finally:
        prompts.close()


async def _try_rows(config: Config, prompts: Prompts, folder: Path) -> list[Tried]:
    for name, content in prompts.model_files.items():
        (folder / name).write_bytes(content)
    trials = Trials(config.reward, prompts.tokenizer, prompts.in_turn)

    def take(result: RewardResult) -> None:
        trials.take(result)

    one_worker = config.reward.model_copy(update={"workers": 1})
    sets, steps = prompts.scored_alike, config.train.steps
    pool = RewardPool(one_worker, sets, folder, folder, take, lambda _: None, steps)
    try:
        await pool.start()
        require_whole_groups(config, pool.by_group)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(pool.run(), name="scores")
            tried = await trials.run(pool, await first_rows(config, prompts))
            serving.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        await pool.stop()
    return tried


def describe(config: Config) -> Iterator[str]:
    """For a dry run; each line with a label of twelve columns. Raises as `try_rewards`, and
    RewardError after all lines."""
    try:
        tried, notes = try_rewards(config)
    except DataUnreachable as e:
        yield f"{'note':12}{e}: no reward was tried"
        return
    errors: list[RewardError] = []
    for each in tried:
        yield f"{'rewards':12}{each.sentence()}"
        try:
            notes += doubts(config.reward, each)
        except RewardError as e:
            errors.append(e)
    yield from (f"{'note':12}{note}" for note in notes)
    if errors:
        raise errors[0]
