"""The protocol of rows: read by number, identified by keys.

Several files are one set of rows; jsonl.py and arrow.py read files.
"""

import bisect
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightrl.data.layouts import content_key, explicit_id, id_key, prompt_column

CHANGED = (
    "has changed since it was read first; put the old file back, and lightrl resume continues the "
    "run"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Hashes of the ids and prompts of a file, one value for each row, in order."""

    ids: NDArray[np.uint64]
    # False: the row has no id of its own, and its key means nothing
    has_id: NDArray[np.bool_]
    contents: NDArray[np.uint64]


def keys_of(rows: Iterable[Mapping[str, Any]], prompt_key: str) -> Keys:
    ids, has_id, contents = array("Q"), bytearray(), array("Q")
    for row in rows:
        own = explicit_id(row)
        ids.append(0 if own is None else id_key(own))
        has_id.append(own is not None)
        contents.append(content_key(row.get(prompt_column(row, prompt_key), row)))
    return Keys(
        np.frombuffer(ids, np.uint64),
        np.frombuffer(bytes(has_id), np.bool_),
        np.frombuffer(contents, np.uint64),
    )


class Rows(Protocol):
    """The rows of one file, numbered from 0. Only an index is in memory. NaN, a missing value in
    a file, is None in rows and keys.

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

    def read(self, index: int) -> dict[str, Any]: ...

    def scan(self) -> Iterator[dict[str, Any]]:
        """All rows in order."""
        ...


class MadeRows:
    """Rows {"index": k}, of an environment that needs no more. Implements `Rows`."""

    def __init__(self, label: str, indices: range) -> None:
        self._indices = indices
        self.num_rows = len(indices)
        self.columns: tuple[str, ...] = ("index",)
        self.digest = label

    def keys(self) -> Keys:
        ids = np.array(self._indices, np.uint64)
        return Keys(ids, np.ones(len(ids), np.bool_), np.zeros(len(ids), np.uint64))

    def where(self, index: int) -> str:
        return f"task {self._indices[index]}"

    def read(self, index: int) -> dict[str, Any]:
        return {"index": self._indices[index]}

    def scan(self) -> Iterator[dict[str, Any]]:
        return map(self.read, range(self.num_rows))


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
            np.concatenate([k.contents for k in keys]),
        )

    def where(self, index: int) -> str:
        part, own = self._find(index)
        return part.where(own)

    def read(self, index: int) -> dict[str, Any]:
        part, own = self._find(index)
        return part.read(own)

    def scan(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from part.scan()

    def _find(self, index: int) -> tuple[Rows, int]:
        k = bisect.bisect_right(self._ends, index)
        part = self._parts[k]
        return part, index - self._ends[k] + part.num_rows
