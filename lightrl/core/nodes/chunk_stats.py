"""What the chunks of a node tell about its engine: seconds of a step, and tokens that a step
brings.

Owns two small sums for each node, no policy.
"""

from dataclasses import dataclass, field

FORGET = 0.95  # weight of the past at every chunk; drafts become longer as batches become smaller
PRIOR_TOKENS = 4.0  # of a response, by which the first gain is believed
MOST = 0.5  # of the responses that ran: a chunk of more is whole
# Steps of each response that ran, after which chunks are whole: an engine may send none but those
# of responses that have ended.
ENOUGH_STEPS = 16


@dataclass(slots=True)
class ChunkWindow:
    """Adds up chunks until they cover most of the responses that ran, from one whole chunk to the
    next.

    A single chunk tells how much time has passed, but not of all that ran: an engine sends a
    response that has ended before the tokens of the others are due (`chunk_ms`). By itself it would
    mean that nearly nothing was decoded, and the next one that all was decoded in no time.
    """

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


@dataclass(slots=True)
class Gain:
    """Tokens that one engine step brings a response with history to draft from; without, it is one.

    All responses of a node take part in each of its steps, so they are compared, without a clock:

        gain = tokens of a response with history / tokens of one without,    at least 1

    both summed over the chunks in which there were both, with exponential forgetting. Of a chunk
    only those count that ran all the time since the one before. While a node has but one of the two
    kinds the gain stays, and `Speed` takes up what is wrong with it: a node that never had both
    counts tokens as steps.
    """

    tokens: float = 1.0
    # decayed sums of means
    _with: float = field(init=False)
    _without: float = field(init=False, default=PRIOR_TOKENS)
    # Of the chunk at hand: responses, those with history, and of each kind (responses, tokens) that
    # ran on.
    _num: int = field(init=False, default=0)
    _num_with: int = field(init=False, default=0)
    _ran_with: int = field(init=False, default=0)
    _tokens_with: int = field(init=False, default=0)
    _ran_without: int = field(init=False, default=0)
    _tokens_without: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._with = self.tokens * PRIOR_TOKENS

    def observe(self, has_history: bool, num_tokens: int, is_whole: bool) -> None:
        """A response got tokens; `is_whole`: it runs since before the last chunk, and still
        does."""
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
        """The chunk is over. Returns how many tokens a step brought its responses, on average."""
        if self._ran_with and self._ran_without:
            self._with = FORGET * self._with + self._tokens_with / self._ran_with
            self._without = FORGET * self._without + self._tokens_without / self._ran_without
            self.tokens = max(1.0, self._with / self._without)
        mean = 1.0 + (self.tokens - 1.0) * self._num_with / self._num if self._num else 1.0
        self._num = self._num_with = 0
        self._ran_with = self._tokens_with = self._ran_without = self._tokens_without = 0
        return mean
