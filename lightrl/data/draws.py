"""The prompts of all sets in the order of draws, prepared ahead of time.

A thread reads, templates and tokenises them, so that the event loop never waits for a file.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from lightrl.data.order import RowCursor, SetOrder
from lightrl.data.prompts import DROPPED, KEPT, UNKNOWN, Prompt, PromptSet
from lightrl.errors import DataError

RECENT = 4096  # prompts that were drawn last
SKIPPED = 1024  # rows read at a time
AHEAD = 256  # prompts at a time, at least
Result = TypeVar("Result")
Drawn: TypeAlias = tuple[int, int, Prompt]  # number of its set, epoch of that


class Draws:
    """The prompt of the n-th draw depends on the data, the seed and n alone."""

    def __init__(self, sets: Sequence[PromptSet], seed: int, *, shuffle: bool, batch: int) -> None:
        """`batch`: the usual number of one draw. `skip`, then `start`."""
        self._sets = sets
        weights = [one.weight for one in sets]
        shares = [len(one) if w is None else w for one, w in zip(sets, weights, strict=True)]
        self._order = SetOrder(shares, seed)
        # the first set is drawn as if it were alone
        seeds = [f"{seed}/{k}" if k else f"{seed}" for k in range(len(sets))]
        cursors = [
            RowCursor(len(one), s, shuffle=shuffle) for one, s in zip(sets, seeds, strict=True)
        ]
        self._rows = [_KeptRows(one, c) for one, c in zip(sets, cursors, strict=True)]
        self._num_ahead = 0  # taken from the sets
        self._batch = max(AHEAD, batch)
        self._ready: deque[Drawn] = deque()
        self._blocks: deque[Future[list[Drawn]]] = deque()
        self._places: dict[str, tuple[int, int]] = {}  # id -> set and row, of those drawn here
        self._recent: OrderedDict[str, Prompt] = OrderedDict()
        # the only thread that reads and tokenises: tokenizers are not thread-safe
        self._thread = ThreadPoolExecutor(1, "data")
        self.waited_s = 0.0  # by all draws

    def start(self) -> None:
        """Start to prepare the first prompts."""
        if self._sets:
            self._blocks += [self._thread.submit(self._prepare) for _ in range(2)]

    async def draw(self, count: int) -> list[tuple[int, Prompt]]:
        """The next as (epoch of its set, prompt); one call at a time. Raises DataError for a row
        that is wrong."""
        begun_at = time.perf_counter()
        while len(self._ready) < count:
            self._ready.extend(await asyncio.wrap_future(self._blocks[0]))
            self._blocks.popleft()
            self._blocks.append(self._thread.submit(self._prepare))
        self.waited_s += time.perf_counter() - begun_at
        drawn = [self._ready.popleft() for _ in range(count)]
        for k, _, prompt in drawn:
            self._places[prompt.id] = (k, prompt.index)
            self._store(prompt)
        return [(epoch, prompt) for _, epoch, prompt in drawn]

    def skip(self, num_drawn: int) -> None:
        """Continue after `num_drawn` draws of another process; `get` finds their prompts too."""
        self._num_ahead = num_drawn
        for rows, count in zip(self._rows, self._order.counts(num_drawn), strict=True):
            rows.skip(count)

    def cached(self, prompt: str) -> Prompt | None:
        """Return a prompt that was drawn lately; None: `get` must read it."""
        if (found := self._recent.get(prompt)) is not None:
            self._recent.move_to_end(prompt)
        return found

    async def get(self, prompt: str) -> Prompt:
        """Return any prompt that was drawn. Raises DataError."""
        if (found := self.cached(prompt)) is not None:
            return found
        return self._store(await asyncio.wrap_future(self._thread.submit(self._read, prompt)))

    async def in_turn(self, act: Callable[[], Result]) -> Result:
        """Run `act` in the thread, for other code that reads rows or tokenises."""
        return await asyncio.wrap_future(self._thread.submit(act))

    def set_of(self, prompt: str) -> int:
        """The number of the set that has a prompt of this id."""
        name = prompt.partition("/")[0]
        return next(k for k, one in enumerate(self._sets) if one.name == name)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _store(self, prompt: Prompt) -> Prompt:
        self._recent[prompt.id] = prompt
        if len(self._recent) > max(RECENT, self._batch):
            self._recent.popitem(last=False)
        return prompt

    # In the thread

    def _prepare(self) -> list[Drawn]:
        numbers = self._order.of(self._num_ahead, self._batch).tolist()
        self._num_ahead += self._batch
        taken = {k: iter(self._rows[k].take(n)) for k, n in Counter(numbers).items()}
        drawn: list[Drawn] = []
        for k in numbers:
            epoch, prompt = next(taken[k])
            drawn.append((k, epoch, prompt))
        return drawn

    def _read(self, prompt: str) -> Prompt:
        k, row = self._places.get(prompt) or self._find(prompt)
        [found] = self._sets[k].prepare([row])
        return found

    def _find(self, prompt: str) -> tuple[int, int]:
        """The place of a prompt that another process has drawn, the latest draws first."""
        k = self.set_of(prompt)
        for row in self._rows[k].drawn_before:
            own = self._sets[k].id_of(row)
            self._places.setdefault(own, (k, row))
            if own == prompt:
                return k, row
        raise DataError(f"{self._sets[k].settings.path}: has no prompt {prompt}")


class _KeptRows:
    """Rows of one set in the order of draws, without dropped ones."""

    def __init__(self, prompts: PromptSet, cursor: RowCursor) -> None:
        self._prompts = prompts
        self._cursor = cursor
        self.drawn_before: Iterator[int] = iter(())  # `skip`: the last first, none twice

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next that are kept, as (epoch, prompt)."""
        taken: list[tuple[int, Prompt]] = []
        while len(taken) < count:
            drawn = self._cursor.draw(count - len(taken))
            states = self._prompts.states
            prepared = iter(
                self._prompts.prepare([row for _, row in drawn if states[row] != DROPPED])
            )
            new = [(epoch, next(prepared)) for epoch, row in drawn if states[row] == KEPT]
            taken += new
            if not new:
                self._prompts.require_any()
        return taken

    def skip(self, count: int) -> None:
        """Continue after `count` rows were taken."""
        states = self._prompts.states
        if self._prompts.keeps_all:
            self._cursor.go_to(count)
            self.drawn_before = self._cursor.backwards()
            return
        left = count
        while left:
            drawn = [row for _, row in self._cursor.draw(min(left, SKIPPED))]
            self._prompts.prepare([row for row in drawn if states[row] == UNKNOWN])
            left -= sum(states[row] == KEPT for row in drawn)
        self.drawn_before = (row for row in self._cursor.backwards() if states[row] == KEPT)
