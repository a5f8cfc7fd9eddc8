"""The running mean of tokens per response, by which tail-batched runs normalise tokens.

With token normalisation an update divides the sum over its tokens by their number. Rounds of tail
batching differ in how long their responses are: a long round has the same one division for several
times the tokens, so that each of its tokens would weigh that much less than one of a short round,
and the longest responses less than in a run without tail batching. Instead an update is divided by

    responses of the update x T / R,    T = sum of k^(s - t) T_t,    R = sum of k^(s - t) R_t

with T_t and R_t the trained tokens and the responses of step t, s the current step with its updates
so far, and k = `KEEP`: 50 steps count most, several periods of short and long rounds. All
tokens of such a period then weigh about the same, as in one large batch. The mean follows from the
counts in the commands alone: it is equal on all ranks, and a step that is trained again has the
same. Until the first long round it is the mean of short rounds.
"""

KEEP = 0.98  # of what was counted, from each step to the next


class TokenMean:
    """Keeps the mean. Example: m = TokenMean(); m.add(4, 40) == 10.0; m.add(4, 120) == 20.0"""

    def __init__(self) -> None:
        self.sums = (0.0, 0.0)  # responses and tokens; a checkpoint holds them
        self._at_begin = self.sums  # of the step

    def add(self, num_responses: int, num_tokens: int) -> float:
        """Count an update. Return the mean number of tokens of a response; 0.0 before the first."""
        self.sums = (self.sums[0] + num_responses, self.sums[1] + num_tokens)
        responses, tokens = self.sums
        return tokens / responses if responses else 0.0

    def restore(self, sums: tuple[float, float]) -> None:
        """Set the sums of a checkpoint."""
        self.sums = self._at_begin = sums

    def end_step(self) -> None:
        responses, tokens = self.sums
        self.restore((KEEP * responses, KEEP * tokens))

    def clear(self) -> None:
        """The step is reset."""
        self.sums = self._at_begin
