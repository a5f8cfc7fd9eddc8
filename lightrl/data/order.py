"""The order of prompts: the set of each draw, and its row.

A function of the run's seed and the number of draws; a resume needs nothing else. Pure, but for
numpy.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

# 2**64 divided by the golden ratio: multiples of it, modulo 2**64, fall evenly into any interval.
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64


class SetOrder:
    """The set of the n-th draw.

    A low-discrepancy sequence in place of independent draws: among any consecutive draws each set
    has its share, within about two.
    """

    def __init__(self, shares: Sequence[float], seed: int) -> None:
        """`shares` above 0, one for each set, need not add up to 1."""
        ends = np.cumsum(np.array(shares, np.float64))
        # where in 0..2**64 - 1 the others begin
        self._bounds = np.array([int(e / ends[-1] * _MASK) for e in ends[:-1].tolist()], np.uint64)
        self._offset = _hash(f"sets/{seed}")

    def of(self, start: int, count: int) -> NDArray[np.int64]:
        """Numbers of the sets that draws start..start+count-1 take."""
        numbers = np.arange(start, start + count, dtype=np.uint64)
        places = numbers * np.uint64(GOLDEN) + np.uint64(self._offset)  # modulo 2**64
        return np.searchsorted(self._bounds, places, side="right")

    def counts(self, num_drawn: int) -> list[int]:
        """Number of each set's draws among the first `num_drawn`."""
        counts = np.zeros(len(self._bounds) + 1, np.int64)
        for start in range(0, num_drawn, 1 << 20):
            part = self.of(start, min(1 << 20, num_drawn - start))
            counts += np.bincount(part, minlength=len(counts))
        return counts.tolist()


class RowCursor:
    """Draws numbers of rows epoch after epoch, each in its own order that depends on (seed, epoch)
    only."""

    def __init__(self, num_rows: int, seed: str, *, shuffle: bool) -> None:
        if num_rows < 1:
            raise ValueError("a cursor needs at least one row")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self.go_to(0)

    def go_to(self, num_drawn: int) -> None:
        """Continue after `num_drawn` draws."""
        self._epoch, self._position = divmod(num_drawn, self._num_rows)
        self._order = self._order_of(self._epoch)

    def draw(self, n: int) -> list[tuple[int, int]]:
        """The next n as (epoch, row). An epoch holds every row once."""
        drawn: list[tuple[int, int]] = []
        while len(drawn) < n:
            if self._position == self._num_rows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            end = min(self._num_rows, self._position + n - len(drawn))
            drawn += [(self._epoch, i) for i in self._order[self._position : end].tolist()]
            self._position = end
        return drawn

    def backwards(self) -> Iterator[int]:
        """The rows that were drawn, the last first, none twice; as they are now."""
        own = self._order[: self._position]
        seen = set(own.tolist())
        before = self._order_of(self._epoch - 1) if self._epoch else own[:0]
        return chain(
            reversed(own.tolist()), (row for row in reversed(before.tolist()) if row not in seen)
        )

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        rows = np.arange(self._num_rows)
        if not self._shuffle:
            return rows
        noise = _mixed(rows.astype(np.uint64) + np.uint64(_hash(f"{self._seed}/{epoch}")))
        return np.argsort(noise, kind="stable")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014) of each: a permutation of 64-bit numbers that looks
    random; the same in every release of numpy."""
    values = values * np.uint64(GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX[1])
    return values ^ (values >> np.uint64(31))
