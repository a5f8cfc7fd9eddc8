"""The prompts of one set: read and templated by the number of their row, with stable ids.

Owns the ids, and which prompts are dropped. The order of draws is in order.py.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightrl.config.data import Data, DataSet, TrainSet
from lightrl.config.environment import Environment
from lightrl.data.layouts import (
    ANSWER_COLUMNS,
    TOOLS,
    answer_of,
    content_id,
    explicit_id,
    portable,
    prompt_column,
    prompt_of,
    require_usable,
)
from lightrl.data.rows import Rows
from lightrl.data.sources import open_rows
from lightrl.data.template import Template, Templated, chat_of
from lightrl.errors import DataError

BATCH = 1024  # prompts tokenised in one call
UNKNOWN, KEPT, DROPPED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task. Example: Prompt(17, "sums/17", "39%3=", array("i", [5, 11, 12, 5, 13]), {...})."""

    # of the row in its set
    index: int
    # stable over runs and epochs
    id: str
    # chat template applied; "" where an environment makes it
    text: str
    # int32; none where an environment makes them
    token_ids: "array[int]"
    # all columns that JSON can carry
    row: dict[str, Any]


class PromptSet:
    """Reads rows on demand; only exceptions among their ids are in memory.

    With an environment prompts have neither text nor tokens, and none is dropped. Where it consists
    of tools alone, each row needs a prompt, which becomes the messages that its episodes begin
    with.
    """

    def __init__(
        self,
        settings: DataSet,
        data: Data,
        tokenizer: Any,
        vocabulary: int = 0,
        environment: Environment = Environment(),  # noqa: B008
    ) -> None:
        """`settings` as `config.data.resolved` gives them; `vocabulary`: of the model, 0 = not
        known. Raises DataError, one line."""
        self._data, self._environment = data, environment
        self.settings = settings
        self.rows: Rows = open_rows(settings)
        self._num = self.rows.num_rows
        if not self._num:
            raise DataError(f"{settings.path}: contains no prompts")
        self.columns = self.rows.columns
        self._template = Template(data, tokenizer, vocabulary)
        self._column = prompt_column(dict.fromkeys(self.columns), settings.prompt_key)
        self._needed = frozenset({self._column, settings.answer_key})
        # rows with a unique id of their own, and numbers of repeated prompts
        self._has_own_id, self._numbers, keys = _peculiarities(self.rows)
        # number of rows, a digest of their ids or prompts, and one of all columns
        self.digest = f"{self._num} {keys} {self.rows.digest}"
        self.states = bytearray(self._num)
        self.keeps_all = data.too_long == "error"
        self._portable_columns: set[str] = set()
        self._has_answers = False
        self.longest_dropped = 0  # tokens, of the rows that were read

    def __len__(self) -> int:
        """Rows, whether or not their prompts are kept."""
        return self._num

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def weight(self) -> float | None:
        """Return the weight of the set in training; None = its size."""
        return self.settings.weight if isinstance(self.settings, TrainSet) else None

    @property
    def have_answers(self) -> bool:
        """Return whether a row has a reference answer, or is unread and has the column."""
        could = {self.settings.answer_key, *ANSWER_COLUMNS} & set(self.columns)
        return self._has_answers or (UNKNOWN in self.states and bool(could))

    @property
    def portable(self) -> tuple[str, ...]:
        """The columns that reward functions get of any row; all columns while rows are unread."""
        if UNKNOWN in self.states:
            return self.columns
        return tuple(name for name in self.columns if name in self._portable_columns)

    def prepare(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of these rows, in this order, without dropped ones."""
        return self._prepare(indices, [self._portable(i, self.rows.read(i)) for i in indices])

    def id_of(self, index: int) -> str:
        where = self.rows.where(index)
        row = self.rows.read(index)
        return self._id_of(where, index, row, self._prompt_of(where, row))

    def scan(self) -> Iterator[Prompt]:
        """All prompts that are kept, in file order. Sets the states of all rows."""
        indices: list[int] = []
        rows: list[dict[str, Any]] = []
        for index, row in enumerate(self.rows.scan()):
            indices.append(index)
            rows.append(row := self._portable(index, row))
            self._portable_columns.update(row)
            self._has_answers |= answer_of(row, self.settings.answer_key) is not None
            if len(indices) == BATCH or index + 1 == self._num:
                yield from self._prepare(indices, rows)
                indices, rows = [], []

    def first(self, most: int) -> Iterator[Prompt]:
        """Yield the prompts of the first `most` rows, one by one, as `scan` does."""
        for index, row in enumerate(islice(self.rows.scan(), most)):
            yield from self._prepare([index], [self._portable(index, row)])

    @property
    def num_dropped(self) -> int:
        """Return the number of rows read so far whose prompt was dropped."""
        return self.states.count(DROPPED)

    def require_any(self) -> None:
        """Raises DataError if all prompts are dropped."""
        if self.num_dropped == self._num:
            raise DataError(
                f"{self.settings.path}: every prompt ({self._num:,}) has more than "
                f"data.max_prompt_length = {self._data.max_prompt_length} tokens"
            )

    def notes(self) -> list[str]:
        """Probable mistakes in the prompts read so far, one line each."""
        return [f"{self.name}: {note}" for note in self._template.notes()]

    def dropped_line(self) -> str:
        """The number of dropped prompts as a line; "" for none."""
        if not (num := self.num_dropped):
            return ""
        return (
            f"data: {self.name}: {num:,} of {self._num:,} prompts have more than "
            f"data.max_prompt_length = {self._data.max_prompt_length} tokens and are left out; the "
            f"longest has {self.longest_dropped:,}"
        )

    def _portable(self, index: int, row: dict[str, Any]) -> dict[str, Any]:
        return portable(self.rows.where(index), row, self._needed)

    def _prepare(self, indices: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[Prompt]:
        prepared: list[Prompt] = []
        for start in range(0, len(indices), BATCH):
            part = slice(start, start + BATCH)
            wheres = [self.rows.where(i) for i in indices[part]]
            prompts = [self._prompt_of(w, r) for w, r in zip(wheres, rows[part], strict=True)]
            if self._environment.enabled:
                given = zip(indices[part], wheres, rows[part], prompts, strict=True)
                prepared += [self._of_environment(*each) for each in given]
                continue
            tools = [row.get(TOOLS) for row in rows[part]]
            templated = self._template.apply(list(zip(wheres, prompts, tools, strict=True)))
            for index, row, where, prompt, made in zip(
                indices[part], rows[part], wheres, prompts, templated, strict=True
            ):
                own = self._id_of(where, index, row, prompt)
                if self._is_kept(index, where, made):
                    prepared.append(Prompt(index, own, made.text, made.token_ids, row))
        return prepared

    def _prompt_of(self, where: str, row: dict[str, Any]) -> Any:
        """Return text or messages; the row itself where an environment needs none."""
        if self._environment.has_first_messages and not isinstance(
            row.get(self._column), str | list
        ):
            return row
        return prompt_of(where, row, self.settings.prompt_key)

    def _of_environment(self, index: int, where: str, row: dict[str, Any], prompt: Any) -> Prompt:
        own = self._id_of(where, index, row, prompt)
        self.states[index] = KEPT
        if not self._environment.has_first_messages:
            chat = chat_of(where, prompt, self._data.system_prompt)
            row = {**row, self._data.prompt_key: chat}
        return Prompt(index, own, "", array("i"), row)

    def _is_kept(self, index: int, where: str, made: Templated) -> bool:
        is_dropped = self._template.is_too_long(where, made)
        self.states[index] = DROPPED if is_dropped else KEPT
        if is_dropped:
            self.longest_dropped = max(self.longest_dropped, len(made.token_ids))
        return not is_dropped

    def _id_of(self, where: str, index: int, row: dict[str, Any], prompt: Any) -> str:
        if self._has_own_id[index]:
            own = explicit_id(row) or str(row["index"])  # of a row that is made
            require_usable(where, own)
        else:
            number = self._numbers.get(index, 0)
            own = content_id(prompt) + (f"-{number + 1}" if number else "")
        return f"{self.name}/{own}"


def _peculiarities(rows: Rows) -> tuple[NDArray[np.bool_], dict[int, int], str]:
    """Rows with a unique id of their own; of the other rows the number of earlier ones with the
    same prompt, where there are any; and a digest of ids and prompts."""
    keys = rows.keys()
    own = keys.has_id.copy()
    if own.any():
        _, inverse, counts = np.unique(keys.ids[own], return_inverse=True, return_counts=True)
        own[np.flatnonzero(own)[counts[inverse] > 1]] = False
    digest = blake2b(digest_size=8)
    for values in (own, np.where(own, keys.ids, 0)):
        digest.update(values.tobytes())
    others = np.flatnonzero(~own)
    numbers: dict[int, int] = {}
    if len(others):
        contents = keys.contents[others]
        digest.update(contents.tobytes())
        order = np.argsort(contents, kind="stable")
        ordered = contents[order]
        begins = np.r_[True, ordered[1:] != ordered[:-1]]
        firsts = np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0))
        places = np.arange(len(ordered)) - firsts
        repeated = places > 0
        numbers = dict(
            zip(others[order[repeated]].tolist(), places[repeated].tolist(), strict=True)
        )
    return own, numbers, digest.hexdigest()


def load_prompts(prompts: PromptSet) -> list[Prompt]:
    """All prompts of a set that are kept, in file order, in memory.

    Raises DataError, one line with file and row, for the first error.
    """
    loaded = list(prompts.scan())
    prompts.require_any()
    return loaded
