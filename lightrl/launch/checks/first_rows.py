"""Reads the data and tries reward functions and environment without a run, for `lightrl check` and
the dry run.

The rows, the worker process and the conclusions are those of a run.
"""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

from lightrl.config.schema import Config
from lightrl.coordinator.prompts import Prompts
from lightrl.coordinator.scoring import require_whole_groups
from lightrl.errors import DataUnreachable, first_error
from lightrl.rewards.protocol import WorkerSetup
from lightrl.rewards.runner import RewardPool
from lightrl.rewards.trial import Trials, Tried
from lightrl.system.temporary import temporary_folder
from lightrl.wire import from_json, to_json


def try_rewards(config: Config) -> tuple[list[Tried], list[str]]:
    """The result for each set, those of the evaluation last; and notes on the prompts. Raises
    ConfigError, DataError or RewardError, one line, if a run would not begin."""
    try:
        with closing(Prompts(config)) as prompts, temporary_folder("check") as folder:
            if not config.reward_functions:
                return [], prompts.notes()
            return asyncio.run(_try_rows(config, prompts, folder)), prompts.notes()
    except DataUnreachable as e:
        return [], [f"{e}: no reward was tried"]


def try_episode(config: Config) -> list[Tried]:
    """The results for the environment, with the first row. Raises as `try_rewards`."""
    from lightrl.environments.trial import try_row

    if config.environment.has_agents and not config.environment.program:
        return [Tried("ok", "agents open sessions while the run is up: no episode was tried")]
    try:
        with closing(Prompts(config)) as prompts, temporary_folder("check") as folder:
            first = next((prompts.train_sets or prompts.eval_sets)[0].first(1))
            row = from_json(to_json(first.row), dict[str, Any])
            return asyncio.run(try_row(config, prompts.tokenizer, row, folder))
    except DataUnreachable as e:
        return [Tried("warn", f"{e}: no episode was tried")]


async def _try_rows(config: Config, prompts: Prompts, folder: Path) -> list[Tried]:
    for name, content in prompts.model_files.items():
        (folder / name).write_bytes(content)
    trials, sets = Trials(config.reward), prompts.scored_alike
    reward = config.reward.model_copy(update={"workers": 1})
    setup = WorkerSetup(reward.model_dump_json(), sets, str(folder), config.train.steps)
    pool = RewardPool(reward, setup, folder, trials.take, lambda _: None)
    try:
        await pool.start()
        require_whole_groups(config, pool.by_group)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(pool.run(), name="scores")
            tried = await trials.run(pool, await prompts.first_rows())
            serving.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        await pool.stop()
    return tried
