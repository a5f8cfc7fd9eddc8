"""Estimate, from a node's chunks, the seconds of an engine step and the tokens that a step samples.

Owns a ChunkWindow and a Gain for each node, no policy.
"""

from dataclasses import dataclass, field

FORGET = 0.95  # weight of the past at every chunk; drafts become longer as batches become smaller
PRIOR_TOKENS = 4.0  # tokens of a response: weight of the initial gain
MOST = 0.5  # of the responses that ran: a chunk with more than this share is whole
# Steps of each response that ran, after which chunks are whole: an engine may send only the tokens
# of responses that have ended.
ENOUGH_STEPS = 16


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


@dataclass(slots=True)
class Gain:
    """Tokens that one engine step samples for a response with history to draft from; one without.

    All responses of a node take part in each of its steps, so the comparison needs no clock:

        gain = tokens of a response with history / tokens of one without,    at least 1

    both summed over the chunks that contain both, with exponential forgetting. Only responses that
    ran during the whole time since the previous chunk count. While a node has only one of the two
    kinds the gain does not change, and `Speed` absorbs its error: a node that never had both counts
    tokens as steps.
    """

    tokens: float = 1.0
    # decayed sums of means
    _with: float = field(init=False)
    _without: float = field(init=False, default=PRIOR_TOKENS)
    # Of the current chunk: responses, those with history, and of each kind (responses, tokens) that
    # still run.
    _num: int = field(init=False, default=0)
    _num_with: int = field(init=False, default=0)
    _ran_with: int = field(init=False, default=0)
    _tokens_with: int = field(init=False, default=0)
    _ran_without: int = field(init=False, default=0)
    _tokens_without: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._with = self.tokens * PRIOR_TOKENS

    def observe(self, has_history: bool, num_tokens: int, is_whole: bool) -> None:
        """Add a response's tokens. `is_whole`: it ran before the last chunk and still runs."""
        self._num += 1
        self._num_with += has_history
        if not is_whole:
            return
        if has_history:
            self._ran_with += 1
            self._tokens_with += num_tokens
        else:
            self._ran_without += 1
            self._tokens_without += num_tokens

    def close(self) -> float:
        """Close the current chunk; return the mean tokens of its responses in a step."""
        if self._ran_with and self._ran_without:
            self._with = FORGET * self._with + self._tokens_with / self._ran_with
            self._without = FORGET * self._without + self._tokens_without / self._ran_without
            self.tokens = max(1.0, self._with / self._without)
        mean = 1.0 + (self.tokens - 1.0) * self._num_with / self._num if self._num else 1.0
        self._num = self._num_with = 0
        self._ran_with = self._tokens_with = self._ran_without = self._tokens_without = 0
        return mean
