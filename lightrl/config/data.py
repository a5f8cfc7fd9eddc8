"""The data section of a run's config: sets of prompts, and the keys that all of them share.

Must stay importable without torch.
"""

import datetime
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from lightrl.config.sections import Names, Positive, Section
from lightrl.config.values import VERIFIERS, without_compression

ANSWER_KEY = "answer"
MAX_SET_NAME = 64  # characters
SetName = Annotated[str, Field(pattern=rf"^([A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_SET_NAME - 1}}})?$")]


class DataSet(Section):
    """One set of prompts, for training or evaluation. `resolved` fills in empty keys."""

    name: SetName = ""
    """prefix of its prompts' ids; default: the name of its file, folder or hub id"""
    path: str = Field(min_length=1)
    """as data.path: file of rows, folder of them, what save_to_disk wrote, or an HF datasets id"""
    subset: str = ""
    """configuration of an HF datasets id, or subfolder of a folder"""
    split: str = ""
    """default: train, where there are several"""
    prompt_key: str = ""
    """default: data.prompt_key"""
    answer_key: str = ""
    """default: data.answer_key"""
    reward: Names = ()
    """its own reward functions; default: reward.functions"""


class TrainSet(DataSet):
    weight: float | None = Field(default=None, gt=0)
    """share of the prompts drawn, relative to the other sets; default: its size"""


SomeSet = TypeVar("SomeSet", bound=DataSet)


class Data(Section):
    path: str = ""
    """file of prompts (JSONL, parquet, CSV or a JSON array), a folder of them, what save_to_disk
    wrote, or an HF datasets id; short for one [[data.sets]]"""
    subset: str = ""
    """of data.path: configuration of an HF datasets id, or subfolder"""
    split: str = ""
    """of data.path; default: train, where there are several"""
    sets: tuple[TrainSet, ...] = ()
    """several sets, each a table [[data.sets]], in place of data.path"""
    prompt_key: str = Field(default="prompt", min_length=1)
    """column with the prompt: text or chat messages"""
    answer_key: str = Field(default=ANSWER_KEY, min_length=1)
    """column with the reference answer; where it is the default, reward_model.ground_truth of
    verl's rows goes before it"""
    as_chat: bool = False
    """plain-text prompts become a user message"""
    system_prompt: str = ""
    """put before chat prompts that have no system message"""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """given to the chat template, e.g. {enable_thinking = false}"""
    date: datetime.date | None = None
    """that chat templates write, as 2026-01-31; default: the day on which the run begins"""
    continue_final: bool = False
    """continue a final assistant message; otherwise such a chat is refused, since its answer would
    be part of the prompt"""
    max_prompt_length: Positive = 1024
    """tokens"""
    too_long: Literal["error", "drop"] = "error"
    """what to do with longer prompts: stop with an error, or leave them out and say how many"""
    shuffle: bool = True
    """a new order every epoch, from run.seed"""

    @property
    def all_sets(self) -> tuple[TrainSet, ...]:
        """All sets to train on, resolved."""
        given = self.sets
        if not given and self.path:
            given = (TrainSet(path=self.path, subset=self.subset, split=self.split),)
        return resolved(given, self)


def resolved(sets: Sequence[SomeSet], data: Data) -> tuple[SomeSet, ...]:
    """Return the sets with names, and with keys of `data` where they have none."""
    return tuple(
        one.model_copy(
            update={
                "name": one.name or _name_of(one),
                "prompt_key": one.prompt_key or data.prompt_key,
                "answer_key": one.answer_key or data.answer_key,
            }
        )
        for one in sets
    )


def _name_of(one: DataSet) -> str:
    """Return the name of the file, folder, id or environment, with the subset."""
    stem = without_compression(one.path.removeprefix(VERIFIERS).partition(":")[0]).stem
    name = "-".join(part for part in (stem, one.subset) if part)
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    return cleaned[:MAX_SET_NAME] or "data"
