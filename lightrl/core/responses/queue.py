"""Responses that wait for a slot, in the order in which they get one."""

import heapq
from collections.abc import Iterator

from lightrl.core.responses.placement import LengthForecast
from lightrl.core.settings import Settings
from lightrl.core.state import Node, Response, ResponseState

# Episodes are in two heaps: that of all responses, and that of the node that ran their last turn.

# (order of the round, is not resumed, -longest of its set, length, unique number of arrival, ...)
Entry = tuple[int, bool, int, float, int, Response]

MAX_VOID = 64  # void entries of one node, beyond twice the length of the queue


class WorkQueue:
    """A heap; an entry whose response was given up, taken back or queued again is skipped."""

    def __init__(self, settings: Settings, expect: LengthForecast, numbers: Iterator[int]) -> None:
        """`numbers`: of entries, shared by all queues: a response has one valid entry."""
        self._settings = settings
        self._expect = expect
        self._heap: list[Entry] = []
        self._homes: dict[str, list[Entry]] = {}  # by Response.last_node
        self._numbers = numbers  # ties are broken by arrival

    def __len__(self) -> int:
        """The number of entries, including those that will be skipped."""
        return len(self._heap)

    @property
    def has_waiting(self) -> bool:
        """Return whether `waiting` is not empty; stops at the first valid entry."""
        return any(_is_valid(number, response) for *_, number, response in self._heap)

    def waiting(self) -> list[Response]:
        """Return the responses that wait, in no order."""
        return [response for *_, number, response in self._heap if _is_valid(number, response)]

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
        heapq.heappush(self._heap, entry)
        if response.last_node:
            home = self._homes.setdefault(response.last_node, [])
            heapq.heappush(home, entry)
            if len(home) > 2 * len(self._heap) + MAX_VOID:
                home[:] = [entry for entry in home if _is_valid(*entry[-2:])]
                heapq.heapify(home)

    def pop(self) -> Response | None:
        """Return the next response that waits, or None."""
        return _pop(self._heap)

    def pop_home(self, node: Node) -> Response | None:
        """Return the next response whose last turn this node ran, or None."""
        response = _pop(self._homes.get(node.name, []))
        while self._heap and not _is_valid(*self._heap[0][-2:]):
            heapq.heappop(self._heap)
        return response


def _pop(heap: list[Entry]) -> Response | None:
    while heap:
        *_, number, response = heapq.heappop(heap)
        if _is_valid(number, response):
            response.queued_as = 0  # its entry in the other heap is void
            return response
    return None


def _is_valid(number: int, response: Response) -> bool:
    return response.state is ResponseState.QUEUED and number == response.queued_as
