"""What rows of a file are to everybody else: read by their number, told apart by their keys.

Owns the protocol, and several files as one. How a file is read is said in jsonl.py and arrow.py.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

CHANGED = (
    "has changed since it was read first; put the old file back, and lightrl resume continues the "
    "run"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """By which the rows of a file are told apart; one value for each row, in order.

    Rows with the same id of their own have the same `ids`, rows with the same prompt the same
    `contents`, which are found out on demand; others differ with a probability next to 1.
    """

    ids: NDArray[np.uint64]
    # False: it has no id of its own, and its key means nothing
    has_id: NDArray[np.bool_]
    contents: Callable[[], NDArray[np.uint64]]


class Rows(Protocol):
    """The rows of one file, numbered from 0. Nothing of them is kept in memory but an index.
    Where a file has NaN, for a value that is missing, rows and keys have None.

    Every method but `where` may raise DataError, one line with file and row.
    """

    num_rows: int
    # those that any row has
    columns: tuple[str, ...]
    # of all that the rows hold, in their order
    digest: str

    def keys(self) -> Keys: ...

    def where(self, index: int) -> str:
        """Example: "train.jsonl, line 3"."""
        ...

    def read(self, index: int) -> dict[str, Any]:
        """The whole row. Quick once `get_ready` is over."""
        ...

    def read_prompt(self, index: int) -> dict[str, Any]:
        """Of the row what its prompt is made of, and its id; quick from the beginning."""
        ...

    def scan(self) -> Iterator[dict[str, Any]]:
        """All rows in order; needs no `get_ready`."""
        ...

    def get_ready(self) -> None:
        """What `read` needs and takes its time; from a thread, once."""
        ...


class JoinedRows:
    """Several files as one. Implements `Rows`."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.num_rows for part in parts))
        self.num_rows = self._ends[-1] if parts else 0
        self.columns = tuple(dict.fromkeys(name for part in parts for name in part.columns))
        digests = "".join(part.digest for part in parts)
        self.digest = blake2b(digests.encode(), digest_size=8).hexdigest()

    def keys(self) -> Keys:
        keys = [part.keys() for part in self._parts]
        return Keys(
            np.concatenate([k.ids for k in keys]),
            np.concatenate([k.has_id for k in keys]),
            lambda: np.concatenate([k.contents() for k in keys]),
        )

    def where(self, index: int) -> str:
        part, own = self._find(index)
        return part.where(own)

    def read(self, index: int) -> dict[str, Any]:
        part, own = self._find(index)
        return part.read(own)

    def read_prompt(self, index: int) -> dict[str, Any]:
        part, own = self._find(index)
        return part.read_prompt(own)

    def scan(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from part.scan()

    def get_ready(self) -> None:
        for part in self._parts:
            part.get_ready()

    def _find(self, index: int) -> tuple[Rows, int]:
        k = bisect.bisect_right(self._ends, index)
        part = self._parts[k]
        return part, index - self._ends[k] + part.num_rows
