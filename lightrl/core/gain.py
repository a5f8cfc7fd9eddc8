"""How many tokens an engine step brings a response that has something to draft from, learned from
the chunks of its node. Owns one small estimate, no policy."""

from dataclasses import dataclass, field

FORGET = 0.95  # weight of the past at every chunk; drafts become longer as batches become smaller
PRIOR_TOKENS = 4.0  # of a response, by which the first gain is believed


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
            self._with = FORGET * self._with + self._tokens_with / self._ran_with
            self._without = FORGET * self._without + self._tokens_without / self._ran_without
            self.tokens = max(1.0, self._with / self._without)
        mean = 1.0 + (self.tokens - 1.0) * self._num_with / self._num if self._num else 1.0
        self._num = self._num_with = 0
        self._ran_with = self._tokens_with = self._ran_without = self._tokens_without = 0
        return mean
