"""Responses that wait for a slot, in the order in which they get one."""

import heapq
from collections.abc import Iterator
from itertools import chain

from lightrl.core.responses.placement import LengthForecast
from lightrl.core.settings import Settings
from lightrl.core.state import Response, ResponseState

# (order of the round, is not resumed, -longest of its set, length, unique number of arrival, ...)
Entry = tuple[int, bool, int, float, int, Response]


class WorkQueue:
    """A heap; an entry whose response was given up, taken back or queued again is skipped."""

    def __init__(self, settings: Settings, expect: LengthForecast, numbers: Iterator[int]) -> None:
        """`numbers`: of entries, shared by all queues: a response has one valid entry."""
        self._settings = settings
        self._expect = expect
        self._heap: list[Entry] = []
        self._homes: dict[str, list[Entry]] = {}  # of episodes, by Response.last_node; never empty
        self._num_at_homes = 0
        self._numbers = numbers  # ties are broken by arrival

    def __len__(self) -> int:
        """The number of entries, including those that will be skipped."""
        return len(self._heap) + self._num_at_homes

    @property
    def has_waiting(self) -> bool:
        """Return whether `waiting` is not empty; stops at the first valid entry."""
        return any(_is_valid(number, response) for *_, number, response in self._entries())

    def waiting(self) -> list[Response]:
        """Return the responses that wait, in no order."""
        return [response for *_, number, response in self._entries() if _is_valid(number, response)]

    def _entries(self) -> Iterator[Entry]:
        return chain(self._heap, *self._homes.values())

    def push(self, response: Response, resumed: bool = False) -> None:
        """Add a response. Older rounds come first, then resumed responses, then the longest
        predicted.

        In an evaluation the set with the longest responses comes first: one of its prompts that is
        short on average may have a sample as long as any. With overlapping steps, odd steps use
        ascending length: a node that ends one step with long responses begins the next with short
        ones (HistoPipe in RhymeRL, arXiv 2508.18588).
        """
        round = response.group.round
        tokens = self._expect(response)
        ascending = self._settings.max_staleness > 0 and round.step % 2 == 1
        order = 2 * round.step + (not round.is_eval)
        response.queued_as = number = next(self._numbers)
        length = tokens if ascending else -tokens
        of_set = -response.group.longest_of_set
        entry = (order, not resumed, of_set, length, number, response)
        if response.last_node:
            heapq.heappush(self._homes.setdefault(response.last_node, []), entry)
            self._num_at_homes += 1
        else:
            heapq.heappush(self._heap, entry)

    def pop(self) -> Response | None:
        """Return the next response that waits for any node, or None."""
        while self._heap:
            *_, number, response = heapq.heappop(self._heap)
            if _is_valid(number, response):
                return response
        return None

    # Episodes that wait for the node that ran their last turn

    @property
    def num_homeless(self) -> int:
        """The number of entries of responses that wait for any node."""
        return len(self._heap)

    def homes(self) -> list[tuple[str, int]]:
        """Return (node, number of entries) of the nodes for which episodes wait."""
        return [(name, len(heap)) for name, heap in self._homes.items()]

    def first_home(self, name: str) -> Response | None:
        """Return the next response that waits for this node, or None; it stays."""
        heap = self._homes.get(name, [])
        while heap and not _is_valid(*heap[0][-2:]):
            self._pop_entry(name)
        return heap[0][-1] if heap else None

    def pop_home(self, name: str) -> Response | None:
        """Return the next response that waits for this node, or None."""
        return None if self.first_home(name) is None else self._pop_entry(name)[-1]

    def leave_home(self, name: str) -> None:
        """Let the next response that waits for this node wait for any node."""
        heapq.heappush(self._heap, self._pop_entry(name))

    def forget_home(self, name: str) -> None:
        """Let all responses that wait for this node wait for any node."""
        while name in self._homes:
            self.leave_home(name)

    def _pop_entry(self, name: str) -> Entry:
        heap = self._homes[name]
        self._num_at_homes -= 1
        entry = heapq.heappop(heap)
        if not heap:
            del self._homes[name]
        return entry


def _is_valid(number: int, response: Response) -> bool:
    return response.state is ResponseState.QUEUED and number == response.queued_as
