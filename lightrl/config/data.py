"""The data section of a run's config: sets of prompts, and what all of them have in common.

Owns how a set is described, for training and evaluation alike, and its default name. What its files
hold is data/'s. Must stay importable without torch.
"""

import datetime
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from lightrl.config.sections import Names, Positive, Section
from lightrl.config.values import VERIFIERS, without_compression

ANSWER_KEY = "answer"
MAX_SET_NAME = 64  # characters
SetName = Annotated[str, Field(pattern=rf"^([A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_SET_NAME - 1}}})?$")]


class DataSet(Section):
    """One set of prompts, for training or evaluation. `resolved` fills in what is left empty."""

    name: SetName = Field(
        default="",
        description="prefix of its prompts' ids; default: the name of its file, folder or hub id",
    )
    path: str = Field(
        min_length=1,
        description="as data.path: file of rows, folder of them, what save_to_disk wrote, or an HF "
        "datasets id",
    )
    subset: str = Field(
        default="", description="configuration of an HF datasets id, or subfolder of a folder"
    )
    split: str = Field(default="", description="default: train, where there are several")
    prompt_key: str = Field(default="", description="default: data.prompt_key")
    answer_key: str = Field(default="", description="default: data.answer_key")
    reward: Names = Field(
        default=(), description="its own reward functions; default: reward.functions"
    )


class TrainSet(DataSet):
    weight: float | None = Field(
        default=None,
        gt=0,
        description="share of the prompts drawn, relative to the other sets; default: its size",
    )


SomeSet = TypeVar("SomeSet", bound=DataSet)


class Data(Section):
    path: str = Field(
        default="",
        description="file of prompts (JSONL, parquet, CSV or a JSON array), a folder of them, what "
        "save_to_disk wrote, or an HF datasets id; short for one [[data.sets]]",
    )
    subset: str = Field(
        default="", description="of data.path: configuration of an HF datasets id, or subfolder"
    )
    split: str = Field(
        default="", description="of data.path; default: train, where there are several"
    )
    sets: tuple[TrainSet, ...] = Field(
        default=(), description="several sets, each a table [[data.sets]], in place of data.path"
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="column with the prompt: text or chat messages"
    )
    answer_key: str = Field(
        default=ANSWER_KEY,
        min_length=1,
        description="column with the reference answer; where it is the default, "
        "reward_model.ground_truth of verl's rows goes before it",
    )
    as_chat: bool = Field(default=False, description="plain-text prompts become a user message")
    system_prompt: str = Field(
        default="", description="put before chat prompts that have no system message"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="given to the chat template, e.g. {enable_thinking = false}",
    )
    date: datetime.date | None = Field(
        default=None,
        description="that chat templates write, as 2026-01-31; default: the day on which the run "
        "begins",
    )
    continue_final: bool = Field(
        default=False,
        description="continue a final assistant message; otherwise such a chat is refused, since "
        "its answer would be part of the prompt",
    )
    max_prompt_length: Positive = Field(default=1024, description="tokens")
    too_long: Literal["error", "drop"] = Field(
        default="error",
        description="what to do with longer prompts: stop with an error, or leave them out and say "
        "how many",
    )
    shuffle: bool = Field(default=True, description="a new order every epoch, from run.seed")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        for key in ("path", "subset", "split"):
            if self.sets and (value := getattr(self, key)):
                raise ValueError(
                    f"data.{key} = {value!r}: is short for a single set, and there are "
                    "[[data.sets]]: give it to one of them"
                )
        weights = [one.weight is not None for one in self.sets]
        if any(weights) and not all(weights):
            which = self.sets[weights.index(False)]
            raise ValueError(
                f"data.sets: {which.name or which.path} has no weight and others have: give it to "
                "all of them, or to none, when each counts by its size"
            )
        self.all_sets  # noqa: B018 - names must differ
        return self

    @property
    def all_sets(self) -> tuple[TrainSet, ...]:
        """All sets to train on, with nothing left empty but what is optional."""
        given = self.sets
        if not given and self.path:
            given = (TrainSet(path=self.path, subset=self.subset, split=self.split),)
        return resolved("data.sets", given, self)


def resolved(key: str, sets: Sequence[SomeSet], data: Data) -> tuple[SomeSet, ...]:
    """Return the sets with names, and with keys of `data` where they have none. `key`: their place
    in the config. Raises ValueError for two sets of the same name."""
    named = tuple(
        one.model_copy(
            update={
                "name": one.name or _name_of(one),
                "prompt_key": one.prompt_key or data.prompt_key,
                "answer_key": one.answer_key or data.answer_key,
            }
        )
        for one in sets
    )
    name, count = Counter(one.name for one in named).most_common(1)[0] if named else ("", 0)
    if count > 1:
        raise ValueError(
            f"{key}: {count} sets are called {json.dumps(name)}; give each a name of its own"
        )
    return named


def _name_of(one: DataSet) -> str:
    """Of the file, folder, id or environment, with the subset."""
    stem = without_compression(one.path.removeprefix(VERIFIERS).partition(":")[0]).stem
    name = "-".join(part for part in (stem, one.subset) if part)
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    return cleaned[:MAX_SET_NAME] or "data"
