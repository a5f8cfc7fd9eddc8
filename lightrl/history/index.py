"""What followed the last few tokens in earlier responses to a prompt.

Owns the arrays in which that is looked up, and their memory. A lookup costs a few binary searches,
each further token of a draft one step along an array, however much is known. Must not know of
engines.

The idea is HistoSpec's (RhymeRL): match the newest tokens, follow the most promising continuation.
Instead of a suffix tree every position of the history holds, worked out at once by sorting, the
position at which the most promising continuation of its own last tokens goes on.
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
_TOKEN_BITS = 20  # a hash has the other 44; one that is wrong once in a while costs a wrong draft
_TIE = 1 - 1e-9  # weights are sums of floats: of continuations this close the newest is taken


@dataclass(frozen=True, slots=True)
class Book:
    """The responses to one prompt. `weights` above 0: of several continuations the heaviest is
    followed.

    Example: Book((1, 2), [[5, 6, 7, 8]], [1.0])
    """

    # its last LONGEST tokens suffice
    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]
    # one for each response
    weights: Sequence[float]


class SuffixIndex:
    """Books in one index, of which each is looked up by itself; making one for many costs little
    more.

    Example: in SuffixIndex([Book((1, 2), [[5, 6, 7, 8]], [1.0])]) locate((1, 2)) is where 5 stands,
    from where `draft` reads 5 6 7 8.
    """

    def __init__(self, books: Sequence[Book]) -> None:
        """O(n log n) for n tokens, in numpy."""
        parts: list[npt.NDArray[np.int32]] = []
        filled: list[tuple[int, int, float]] = []  # (book, length, weight) of each response
        for k, book in enumerate(books):
            # So that a first token has a context, too.
            head = np.array(([-1] * LONGEST + list(book.prompt))[-LONGEST:], np.int32)
            for response, weight in zip(book.responses, book.weights, strict=True):
                if len(response):
                    parts += (head, np.asarray(response, np.int32))
                    filled.append((k, LONGEST + len(response), weight))
        lengths = np.array([n for _, n, _ in filled], np.int64)
        tokens = np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, np.int64)
        # Where a response token follows: from the prompt's last token to the response's last but
        # one.
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
        """Where the most promising continuation of `tail` begins; NOWHERE if its last tokens are
        unknown."""
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
        """From where `token` is expected to what is expected after it; NOWHERE if it is another
        one."""
        return self._onward[at] if at >= 0 and self._tokens[at] == token else NOWHERE

    def draft(self, at: int, length: int, min_share: float) -> tuple[list[int], int]:
        """At most `length` tokens from `at` on, fewer where the history ends or becomes too
        ambiguous; and what is expected after them.

        `min_share`: of the weight of all continuations, multiplied along the way; the first is not
        asked.
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
    """(order, hash of the book and of so many tokens that end at each of `at`), as `_HASHES`
    says."""
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
    """For contexts with `hashes`, of which each is followed by a token `following` at `where`:

    the distinct hashes in order, which of them each context has, where its heaviest continuation
    stands (the newest of those), and the share of the weight that it has. Hash and token share one
    word, so that one sort brings equal contexts together, and in them equal continuations.
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
