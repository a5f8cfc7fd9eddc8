"""Look up which tokens followed the last few tokens in earlier responses to a prompt.

A lookup costs a few binary searches, and each further token of a draft one step along an array,
whatever the size of the history.

As HistoSpec (RhymeRL): match the newest tokens and follow the most promising continuation. Instead
of a suffix tree, each position of the history holds the position of the most promising continuation
of its own last tokens; one sort computes them all.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

ORDERS = (7, 5, 3)  # tokens that are matched, the longest first
LONGEST = ORDERS[0]
BYTES_PER_TOKEN = 4 + 4 + 4 + len(ORDERS) * (8 + 4)  # of an index, at most
NOWHERE = -1

_BASE = 0x9E3779B97F4A7C15  # odd; of the polynomial by which tokens are hashed, modulo 2**64
_MASK = (1 << 64) - 1
# Of the newest token first. Not 1: the upper bits are kept, and every token must reach them.
_FACTORS = tuple(_BASE**k & _MASK for k in range(1, LONGEST + 1))
_BOOK_FACTOR = _BASE ** (LONGEST + 1) & _MASK
# Of each order: its factors, oldest token first, and what they make of the 1 that is added to each
# token.
_HASHES = tuple((m, _FACTORS[m - 1 :: -1], sum(_FACTORS[:m])) for m in ORDERS)
_TOKEN_BITS = 20  # a hash has the other 44; a collision costs a wrong draft
_TIE = 1 - 1e-9  # weights are float sums: of continuations this close the newest is taken


@dataclass(frozen=True, slots=True)
class Book:
    """The responses to one prompt, with weights > 0: the heaviest continuation is followed.

    Example: Book((1, 2), [[5, 6, 7, 8]], [1.0])
    """

    # its last LONGEST tokens suffice
    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]
    # one for each response
    weights: Sequence[float]


class SuffixIndex:
    """An index of several books, each of which is looked up separately.

    Example: in SuffixIndex([Book((1, 2), [[5, 6, 7, 8]], [1.0])]) locate((1, 2)) is the position of
    5, from where `draft` reads 5 6 7 8.
    """

    def __init__(self, books: Sequence[Book]) -> None:
        """Build the index in O(n log n) for n tokens, in numpy."""
        parts: list[npt.NDArray[np.int32]] = []
        filled: list[tuple[int, int, float]] = []  # (book, length, weight) of each response
        for k, book in enumerate(books):
            # The context of the first token.
            head = np.array(([-1] * LONGEST + list(book.prompt))[-LONGEST:], np.int32)
            for response, weight in zip(book.responses, book.weights, strict=True):
                if len(response):
                    parts += (head, np.asarray(response, np.int32))
                    filled.append((k, LONGEST + len(response), weight))
        lengths = np.array([n for _, n, _ in filled], np.int64)
        tokens = np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, np.int64)
        # Positions followed by a response token: from the last of the prompt to the last but one of
        # the response.
        ends = np.cumsum(lengths)
        is_context = np.ones(len(tokens), bool)
        is_context[ends - 1] = False
        for i in range(LONGEST - 1):
            is_context[ends - lengths + i] = False
        at = np.flatnonzero(is_context)
        weight = np.repeat(np.array([w for _, _, w in filled], np.float64), lengths)[at]
        book = np.repeat(np.array([k for k, _, _ in filled], np.uint64), lengths)[at]
        onward = np.full(len(tokens), NOWHERE, np.int32)
        share = np.zeros(len(tokens), np.float32)
        self._tables: dict[int, tuple[array[int], array[int]]] = {}
        for order, hashes in _hashes(tokens, at, book):
            keys, group, best, best_share = _best(hashes, tokens[at + 1], weight, at + 1)
            self._tables[order] = (
                array("Q", keys.tobytes()),
                array("i", best.astype(np.int32).tobytes()),
            )
            if order == LONGEST:
                onward[at], share[at] = best[group], best_share[group]
        self._tokens = array("i", tokens.astype(np.int32).tobytes())
        self._onward = array("i", onward.tobytes())
        self._share = array("f", share.tobytes())

    def locate(self, tail: Sequence[int], book: int = 0) -> int:
        """Return the position of the best continuation of `tail`; NOWHERE if there is none."""
        if len(tail) < LONGEST:
            tail = [-1] * (LONGEST - len(tail)) + list(tail)
        for order, factors, offset in _HASHES:
            value = book * _BOOK_FACTOR + offset + sum(map(mul, tail[-order:], factors))
            key = (value & _MASK) >> _TOKEN_BITS
            keys, best = self._tables[order]
            i = bisect_left(keys, key)
            if i < len(keys) and keys[i] == key:
                return best[i]
        return NOWHERE

    def advance(self, at: int, token: int) -> int:
        """Return the position after `token` at `at`; NOWHERE if another token is there."""
        return self._onward[at] if at >= 0 and self._tokens[at] == token else NOWHERE

    def draft(self, at: int, length: int, min_share: float) -> tuple[list[int], int]:
        """Return at most `length` tokens from `at` on, and the position after them.

        The draft ends where the history ends, or where the product of the tokens' shares of the
        weight of all continuations falls below `min_share`.
        """
        tokens, onward, share = self._tokens, self._onward, self._share
        found: list[int] = []
        likely = 1.0
        while at >= 0 and len(found) < length and likely >= min_share:
            found.append(tokens[at])
            likely *= share[at]
            at = onward[at]
        return found, at


def _hashes(
    tokens: npt.NDArray[np.int64], at: npt.NDArray[np.int64], book: npt.NDArray[np.uint64]
) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yield (order, hashes of the book and the last `order` tokens up to each of `at`)."""
    plus_one = (tokens + 1).astype(np.uint64)
    value = book * np.uint64(_BOOK_FACTOR)
    for back, factor in enumerate(_FACTORS, 1):
        value += plus_one[at - back + 1] * np.uint64(factor)
        if back in ORDERS:
            yield back, value >> np.uint64(_TOKEN_BITS)


def _best(
    hashes: npt.NDArray[np.uint64],
    following: npt.NDArray[np.int64],
    weight: npt.NDArray[np.floating[Any]],
    where: npt.NDArray[np.int64],
) -> tuple[
    npt.NDArray[np.uint64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.floating[Any]],
]:
    """Find the heaviest continuation of each context.

    Context i has hashes[i] and is followed by the token following[i] at position where[i]. Returns
    the sorted distinct hashes, the index of each context's hash, and for each hash the position of
    its heaviest continuation (the newest on a tie) and its share of the weight. Hash and token are
    in one word, so that one sort groups equal contexts and their equal continuations.
    """
    token = following.astype(np.uint64) & np.uint64((1 << _TOKEN_BITS) - 1)
    both = hashes << np.uint64(_TOKEN_BITS) | token
    order = np.argsort(both)
    both = both[order]
    h = both >> np.uint64(_TOKEN_BITS)
    is_branch = np.ones(len(both), bool)
    np.not_equal(both[1:], both[:-1], out=is_branch[1:])
    is_key = np.ones(len(both), bool)
    np.not_equal(h[1:], h[:-1], out=is_key[1:])
    branches = np.flatnonzero(is_branch)
    mass = np.add.reduceat(weight[order], branches)
    newest = np.maximum.reduceat(where[order], branches)
    key_of_item = np.cumsum(is_key) - 1
    key_of_branch = key_of_item[branches]
    first_branch = np.flatnonzero(is_key[branches])
    most = np.maximum.reduceat(mass, first_branch)
    is_best = mass >= _TIE * most[key_of_branch]
    best = np.maximum.reduceat(np.where(is_best, newest, NOWHERE), first_branch)
    group = np.empty(len(both), np.int64)
    group[order] = key_of_item
    return h[is_key], group, best, most / np.add.reduceat(mass, first_branch)
