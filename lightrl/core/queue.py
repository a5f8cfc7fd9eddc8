"""Responses that wait for a slot, in the order in which they should get one."""

import heapq

from lightrl.core.placement import Foresee
from lightrl.core.settings import Settings
from lightrl.core.state import Response, ResponseState


class WorkQueue:
    """A heap; an entry whose response was given up, taken back or queued once more is skipped."""

    def __init__(self, settings: Settings, expect: Foresee) -> None:
        self._settings = settings
        self._expect = expect
        self._heap: list[tuple[int, bool, float, int, Response]] = []
        self.tokens = 0.0  # predicted, of all entries
        self._num_pushed = 0  # so far: ties are broken by arrival

    def __len__(self) -> int:
        """Entries, those that will be skipped included."""
        return len(self._heap)

    def waiting(self) -> list[Response]:
        """In no order."""
        return [response for *_, number, response in self._heap if _is_valid(number, response)]

    def push(self, response: Response, resumed: bool = False) -> None:
        """Older rounds first, then what is resumed, then what is predicted to run longest.

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
        heapq.heappush(self._heap, (order, not resumed, length, self._num_pushed, response))

    def pop(self) -> Response | None:
        """The next that waits, or None."""
        while self._heap:
            _, _, length, number, response = heapq.heappop(self._heap)
            self.tokens = self.tokens - abs(length) if self._heap else 0.0
            if _is_valid(number, response):
                return response
        return None


def _is_valid(number: int, response: Response) -> bool:
    return response.state is ResponseState.QUEUED and number == response.queued_as
