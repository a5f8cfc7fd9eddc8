"""Responses that wait for a slot, in the order in which they should get one; from both ends where
nodes that leave soon take the short ones."""

import heapq

from lightrl.core.placement import LengthForecast
from lightrl.core.settings import Settings
from lightrl.core.state import Response, ResponseState

# of the round, resumed or not, by what its set may take, by length, of arrival: that is unique
Entry = tuple[int, bool, int, float, int, Response]


class WorkQueue:
    """A heap; an entry whose response was given up, taken back or queued once more is skipped."""

    def __init__(self, settings: Settings, expect: LengthForecast) -> None:
        self._settings = settings
        self._expect = expect
        self._heap: list[Entry] = []
        # The same from the other end, once that was asked for, until the queue is empty; and what
        # was taken from there: its numbers
        self._shortest: list[Entry] | None = None
        self._taken: set[int] = set()
        self.tokens = 0.0  # predicted, of all entries
        self._num_pushed = 0  # so far: ties are broken by arrival

    def __len__(self) -> int:
        """Entries, those that will be skipped included."""
        return len(self._heap) - len(self._taken)

    @property
    def has_waiting(self) -> bool:
        """Whether `waiting` is not empty; looks no further than the first."""
        return any(_is_valid(number, response) for *_, number, response in self._heap)

    def waiting(self) -> list[Response]:
        """In no order."""
        return [response for *_, number, response in self._heap if _is_valid(number, response)]

    def push(self, response: Response, resumed: bool = False) -> None:
        """Older rounds first, then what is resumed, then what is predicted to run longest.

        In an evaluation the set with the longest responses comes first: one of its prompts that is
        short on average may have a sample as long as any.

        With steps that overlap, every other one goes by ascending length instead: a node that ends
        one step with long responses begins the next with short ones (HistoPipe in RhymeRL, arXiv
        2508.18588).
        """
        round = response.group.round
        tokens = self._expect(response)
        ascending = self._settings.max_staleness > 0 and round.step % 2 == 1
        order = 2 * round.step + (not round.is_eval)
        self._num_pushed += 1
        response.queued_as = self._num_pushed
        length = tokens if ascending else -tokens
        self.tokens += tokens
        of_set = -response.group.longest_of_set
        entry = (order, not resumed, of_set, length, self._num_pushed, response)
        heapq.heappush(self._heap, entry)
        if self._shortest is not None:
            heapq.heappush(self._shortest, _turned(entry))

    def pop(self, shortest: bool = False) -> Response | None:
        """The next that waits, or None; `shortest`: of those that are equal but for their length,
        the other end."""
        if shortest:
            return self._pop_shortest()
        while self._heap:
            *_, length, number, response = heapq.heappop(self._heap)
            if number in self._taken:
                self._taken.discard(number)
            else:
                self.tokens -= abs(length)
            self._see_whether_empty()
            if _is_valid(number, response):
                response.queued_as = 0  # it is in the other order, too
                return response
        return None

    def _pop_shortest(self) -> Response | None:
        if self._shortest is None:
            self._shortest = [_turned(entry) for entry in self._heap]
            heapq.heapify(self._shortest)
        while self._shortest:
            *_, length, number, response = heapq.heappop(self._shortest)
            if _is_valid(number, response):
                response.queued_as = 0
                self._taken.add(number)
                self.tokens -= abs(length)
                self._see_whether_empty()
                return response
        self._heap.clear()  # of what is left all has been given up
        self._taken.clear()
        self._see_whether_empty()
        return None

    def _see_whether_empty(self) -> None:
        if not len(self):
            self._heap, self._shortest, self.tokens = [], None, 0.0
            self._taken.clear()


def _turned(entry: Entry) -> Entry:
    order, is_new, of_set, length, number, response = entry
    return order, is_new, -of_set, -length, number, response


def _is_valid(number: int, response: Response) -> bool:
    return response.state is ResponseState.QUEUED and number == response.queued_as
