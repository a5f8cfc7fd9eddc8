"""How fast a node decodes, learned from the chunks that it sends. Owns two small estimates, no
policy.

`Speed` says how long an engine step takes, `Gain` how many tokens of it a response gets. Without
speculation that is one, and a step is a token.
"""

from dataclasses import dataclass, field

from lightrl.core.line_fit import LineFit

PRIOR_STEP_S = 0.02  # before anything was heard of a node
PRIOR_HALF_BATCH = 128  # responses at which an engine step takes twice as long as with one
FORGET = 0.98  # weight of the past at every observation
PRIOR_WEIGHT = 0.05  # of the assumed shape against one observation
FORGET_GAIN = 0.95  # as FORGET; drafts become longer as the batch becomes smaller
PRIOR_TOKENS = 4.0  # of a response, by which the first gain is believed


@dataclass(slots=True)
class Speed:
    """Seconds of one engine step with B responses: step_s(B) = base + slope * B.

    Least squares over (B, seconds per step) with exponential forgetting. Where only one batch size
    was seen the slope is undetermined: a weak prior keeps the assumed ratio of slope to base.
    """

    base: float = PRIOR_STEP_S
    slope: float = PRIOR_STEP_S / PRIOR_HALF_BATCH
    num_observed: int = 0
    _line: LineFit = field(default_factory=LineFit)

    def observe(self, batch: int, seconds: float) -> None:
        """With `batch` responses running, a step took so long."""
        self._line.add(float(batch), seconds, FORGET)
        self.num_observed += 1
        mean_x, mean_y = self._line.means()
        # The prior in terms of what was measured: base = slope * PRIOR_HALF_BATCH.
        assumed = mean_y / (PRIOR_HALF_BATCH + mean_x)
        slope = self._line.slope(assumed, PRIOR_WEIGHT * PRIOR_HALF_BATCH)
        self.slope = min(max(0.0, slope), 0.95 * mean_y / max(1.0, mean_x))
        self.base = mean_y - self.slope * mean_x

    def step_s(self, batch: int) -> float:
        """Seconds until each of `batch` responses has what one step brings it."""
        return self.base + self.slope * batch


@dataclass(slots=True)
class Gain:
    """Tokens that one engine step brings a response with history to draft from; without, it is one.

    All responses of a node take part in each of its steps, so neighbours tell it, and no clock is
    needed:

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
            self._with = FORGET_GAIN * self._with + self._tokens_with / self._ran_with
            self._without = FORGET_GAIN * self._without + self._tokens_without / self._ran_without
            self.tokens = max(1.0, self._with / self._without)
        mean = 1.0 + (self.tokens - 1.0) * self._num_with / self._num if self._num else 1.0
        self._num = self._num_with = 0
        self._ran_with = self._tokens_with = self._ran_without = self._tokens_without = 0
        return mean
