"""Join many small token entries to few large ones, so that recovery takes seconds.

Pure: returns entries with the same meaning.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightrl.core.events import ResponseScored
from lightrl.core.log_entries import LogEntry, TokensTaken
from lightrl.journal.codec import PackedTokens, pack
from lightrl.messages.responses import FinishReason, ResponseTokens

Ints: TypeAlias = NDArray[np.int64]

LONG_TOKENS = 256  # of an item
GATHER_ITEMS = 1 << 14  # in one index of tokens, which then takes some megabytes


def merge(entries: Iterable[LogEntry | PackedTokens]) -> Iterator[LogEntry]:
    """Yield entries in which tokens between two entries of another kind are one TokensTaken for
    each version, followed by the scores.

    Moving scores behind tokens is safe: a scored response gets no more tokens. Tokens of a response
    that were sent twice, or that continued under an older version, follow as they were recorded.
    """
    tokens = _Items()
    scores: list[LogEntry] = []
    for entry in entries:
        if isinstance(entry, TokensTaken):
            entry = pack(entry) or entry
        if isinstance(entry, PackedTokens):
            tokens.add(entry)
        elif isinstance(entry, ResponseScored):
            scores.append(entry)
        else:
            yield from tokens.joined()
            yield from scores
            yield entry
            tokens, scores = _Items(), []
    yield from tokens.joined()
    yield from scores


class _Items:
    """All items in order of arrival, by column, with their tokens concatenated.

    There are millions, so an item may cost only nanoseconds.
    """

    def __init__(self) -> None:
        self._numbers = _Numbers()  # response -> number
        self._groups = _Numbers()  # version -> number, in the order of their first items
        self._known: dict[str, Ints] = {}  # names of a record -> their numbers
        self._responses: list[Ints] = []
        self._group_of: list[int] = []  # record -> group
        self._attempts, self._offsets, self._counts = bytearray(), bytearray(), bytearray()
        self._token_ids, self._logprobs = bytearray(), bytearray()
        self._finished: dict[int, FinishReason] = {}
        self._num_items = 0

    def add(self, entry: PackedTokens) -> None:
        responses = self._known.get(entry.responses)
        if responses is None:
            responses = np.array([self._numbers[name] for name in entry.names])
            self._known[entry.responses] = responses
        self._responses.append(responses)
        self._group_of.append(self._groups[entry.version])
        self._attempts += entry.attempts
        self._offsets += entry.offsets
        self._counts += entry.counts
        self._token_ids += entry.token_ids
        self._logprobs += entry.logprobs
        for index, reason in entry.finished:
            self._finished[self._num_items + index] = reason
        self._num_items += len(responses)

    def joined(self) -> Iterator[TokensTaken]:
        if not self._num_items:
            return
        self._arrange()
        straight, odd = self._spans()
        for group, version in enumerate(self._groups):
            if group in straight:
                yield TokensTaken(version, tuple(straight[group]))
        versions = list(self._groups)
        for group, indices in groupby(odd, key=lambda index: int(self.group[index])):
            yield TokensTaken(versions[group], tuple(map(self._item, indices)))

    def _arrange(self) -> None:
        self.name = list(self._numbers)
        self.response = np.concatenate(self._responses)
        self.group = np.repeat(np.array(self._group_of), [len(r) for r in self._responses])
        self.attempt = _int32(self._attempts)
        self.offset = _int32(self._offsets).astype(np.int64)
        self.count = _int32(self._counts).astype(np.int64)
        self.start = np.cumsum(self.count) - self.count
        self.token_ids = _int32(self._token_ids)
        self.logprobs = _int32(self._logprobs)  # moved, never interpreted

    def _item(self, index: int) -> ResponseTokens:
        tokens = slice(int(self.start[index]), int(self.start[index] + self.count[index]))
        return ResponseTokens(
            self.name[self.response[index]],
            int(self.attempt[index]),
            int(self.offset[index]),
            self.token_ids[tokens].tobytes(),
            self.logprobs[tokens].tobytes(),
            self._finished.get(index),
        )

    def _spans(self) -> tuple[dict[int, list[ResponseTokens]], list[int]]:
        """Return one item per response and version, by group; and the indices of the items of
        responses with repeated or missing tokens, or that continued under an older version."""
        order = _stable_order(self.response, len(self.name))
        response, group, offset = self.response[order], self.group[order], self.offset[order]
        end = offset + self.count[order]
        follows = response[1:] == response[:-1]
        wrong = follows & ((offset[1:] != end[:-1]) | (group[1:] < group[:-1]))
        is_odd = np.zeros(len(self.name), bool)
        is_odd[response[1:][wrong]] = True
        odd = np.flatnonzero(is_odd[self.response]) if wrong.any() else np.empty(0, np.int64)
        even = ~is_odd[response]
        order, response, group = order[even], response[even], group[even]
        begins = np.concatenate(
            ([True], (response[1:] != response[:-1]) | (group[1:] != group[:-1]))
        )
        first = np.flatnonzero(begins[: len(order)])
        straight: dict[int, list[ResponseTokens]] = {}
        for item, of in zip(self._cut(order, first), group[first].tolist(), strict=True):
            straight.setdefault(of, []).append(item)
        return straight, odd.tolist()

    def _gather(
        self, start: Ints, counts: Ints, ends: Ints
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return tokens and logprobs of these items, concatenated."""
        if ends[-1] > LONG_TOKENS * len(counts):  # copies cost less than an index of tokens
            places = [slice(a, a + n) for a, n in zip(start.tolist(), counts.tolist(), strict=True)]
            ids = np.concatenate([self.token_ids[place] for place in places])
            return ids, np.concatenate([self.logprobs[place] for place in places])
        where = np.repeat(start - ends + counts, counts) + np.arange(int(ends[-1]))
        return self.token_ids.take(where), self.logprobs.take(where)

    def _cut(self, order: Ints, first: Ints) -> Iterator[ResponseTokens]:
        """Yield one item for each run of `order` that begins at an index of `first`."""
        final = np.concatenate((first[1:], [len(order)]))
        at = 0
        while at < len(first):
            most = first[at] + GATHER_ITEMS  # runs that fit, but one at least
            to = max(at + 1, int(np.searchsorted(final, int(most), "right")))
            part = order[first[at] : final[to - 1]]
            counts: Ints = self.count[part]
            ends: Ints = np.cumsum(counts)
            token_ids, logprobs = self._gather(self.start[part], counts, ends)
            starts, stops = first[at:to] - first[at], final[at:to] - first[at]
            for a, z in zip(starts.tolist(), stops.tolist(), strict=True):
                tokens = slice(int(ends[a] - counts[a]), int(ends[z - 1]))
                newest = int(part[z - 1])
                yield ResponseTokens(
                    self.name[self.response[newest]],
                    int(self.attempt[newest]),
                    int(self.offset[part[a]]),
                    token_ids[tokens].tobytes(),
                    logprobs[tokens].tobytes(),
                    self._finished.get(newest),
                )
            at = to


class _Numbers(dict[Any, int]):
    """Numbers keys in the order of their first lookup."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def _int32(data: bytearray) -> NDArray[np.int32]:
    return np.frombuffer(data, "<i4")


def _stable_order(values: Ints, below: int) -> Ints:
    """Return a stable argsort; 16-bit integers are sorted much faster."""
    return np.argsort(values.astype(np.uint16) if below <= 1 << 16 else values, kind="stable")
