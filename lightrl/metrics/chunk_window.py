"""Measure the seconds of an engine step from the chunks that a node sends."""

from dataclasses import dataclass

MOST = 0.5  # of the responses that ran: a chunk with more than this share is whole
# Steps of each response that ran, after which chunks are whole: an engine may send only the tokens
# of responses that have ended.
ENOUGH_STEPS = 16


def size_of(batch: int) -> int:
    """Return the bucket of a batch: four for each power of two: 8 and 9, 10 and 11, 12 and 13, 14
    and 15, 16 to 19, ..."""
    bits = batch.bit_length()
    return 4 * bits + (batch >> (bits - 3) & 3 if bits > 2 else batch - (1 << bits - 1))


@dataclass(slots=True)
class ChunkWindow:
    """Sum of chunks until they cover most of the responses that ran, from one whole chunk to the
    next.

    A single chunk may lack tokens of most responses: an engine sends a response that has ended
    before the tokens of the others are due (`chunk_ms`). Measured alone, such a chunk would contain
    almost no tokens, and the next one would contain all tokens after almost no time.
    """

    # arrival of the last tokens of the running responses
    _at: float | None = None
    # since the last whole chunk: seconds; seconds summed over responses; steps summed over them
    _seconds: float = 0.0
    _response_s: float = 0.0
    _steps: float = 0.0
    # number of responses whose tokens arrived at `_at`
    _num_arrived: int = 0

    def pause(self) -> None:
        """Exclude the following idle time from the seconds of decoding."""
        self._at = None
        self._clear()

    def add(self, now: float, batch: int, num: int, steps: float) -> tuple[int, float] | None:
        """Add a chunk of `num` of the `batch` responses that ran, with `steps` engine steps in
        all. Return the mean batch and the seconds of a step if the chunks are whole, else None."""
        at, self._at = self._at, now
        if at is None or now < at:  # the clock was set back
            self._clear()
            return None
        self._num_arrived = num + (self._num_arrived if now == at else 0)
        self._seconds += now - at
        self._response_s += (now - at) * batch
        self._steps += steps
        is_whole = self._num_arrived > MOST * batch or self._steps >= ENOUGH_STEPS * batch
        if not (is_whole and self._seconds and self._steps):
            return None
        found = round(self._response_s / self._seconds), self._response_s / self._steps
        self._clear()
        return found

    def _clear(self) -> None:
        self._seconds = self._response_s = self._steps = 0.0
        self._num_arrived = 0
