"""How long the engine steps took that chunks tell of.

Owns one small sum for each node, no policy. A chunk tells how much time has passed, but not of all
who ran: an engine sends a response that has ended before the others' tokens are due (`chunk_ms`).
Taken by itself it would say that nearly nothing was decoded, and the next one that all was decoded
in no time. So what chunks of a few bring is added up until one has come of most of those who run.
"""

from dataclasses import dataclass

MOST = 0.5  # of those who ran: a chunk of more is whole
# An engine may send no other chunks than of responses that have ended.
ENOUGH_STEPS = 16  # for each of those who ran, after which they do


@dataclass(slots=True)
class ChunkWindow:
    """From one whole chunk to the next."""

    # when the last tokens came of what runs now
    _at: float | None = None
    # since the last whole chunk: seconds; the same of each response that ran; steps of all of them
    _seconds: float = 0.0
    _response_s: float = 0.0
    _steps: float = 0.0
    # whose tokens came at that moment
    _num_heard: int = 0

    def pause(self) -> None:
        """Nothing runs, which would count as decoding otherwise."""
        self._at = None
        self._clear()

    def took(self, now: float, batch: int, heard: int, steps: float) -> tuple[int, float] | None:
        """A chunk has come of `heard` of the `batch` responses that ran, with so many engine steps
        between them. Returns how many ran and how long a step took, once that can be told."""
        at, self._at = self._at, now
        if at is None or now < at:  # the clock was set back
            self._clear()
            return None
        self._num_heard = heard + (self._num_heard if now == at else 0)
        self._seconds += now - at
        self._response_s += (now - at) * batch
        self._steps += steps
        is_whole = self._num_heard > MOST * batch or self._steps >= ENOUGH_STEPS * batch
        if not (is_whole and self._seconds and self._steps):
            return None
        found = round(self._response_s / self._seconds), self._response_s / self._steps
        self._clear()
        return found

    def _clear(self) -> None:
        self._seconds = self._response_s = self._steps = 0.0
        self._num_heard = 0
