"""The first row of each set of a run, to try its reward functions with before anything is scored.

What is tried and concluded is said in rewards/trial.py.
"""

from functools import partial

from lightrl.config.schema import Config
from lightrl.coordinator.prompts import Prompts
from lightrl.rewards.trial import FirstRow, first_row


async def first_rows(config: Config, prompts: Prompts) -> list[FirstRow]:
    """None of a set whose first prompts are all left out. Raises DataError."""
    return await prompts.in_turn(partial(_read, config, prompts))


def _read(config: Config, prompts: Prompts) -> list[FirstRow]:
    sizes = [config.rollout.group_size] * len(prompts.train_sets)
    sizes += [config.eval_sampling(one).samples for one in config.eval_sets]
    sets = (*prompts.train_sets, *prompts.eval_sets)
    found = (
        first_row(k, one, prompts.scored_alike[k].functions, size)
        for k, (one, size) in enumerate(zip(sets, sizes, strict=True))
    )
    return [row for row in found if row is not None]
