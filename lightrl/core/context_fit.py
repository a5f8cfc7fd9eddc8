"""What a token of context adds to an engine step, told apart from what a response adds.

Owns five decayed sums of deviations. Batch and context change together in a round, and a step's
seconds are no line in the batch; but among steps of nearly one batch, nearly one line does for
both.
"""

import math
from dataclasses import dataclass

KEEP = 0.99  # weight of the past at every observation
RIDGE = 0.05  # deviations of so much of the batch and of the context are believed but half
SURE = 2.0  # standard errors that may be chance, or something else that changes in time
LEAST_NOISE = 0.02  # of an observation, relative
MOST = 0.8  # of a step; the rest is its weights and its responses


@dataclass(slots=True)
class ContextFit:
    """Least squares of seconds over (batch, tokens of context), around means that the caller keeps
    for each size of batch. Assumed is that context costs nothing."""

    # decayed sums
    n: float = 0.0
    bb: float = 0.0
    bc: float = 0.0
    cc: float = 0.0
    bs: float = 0.0
    cs: float = 0.0

    def add(self, batch: float, context: float, seconds: float) -> None:
        """Deviations from the means."""
        self.n = KEEP * self.n + 1
        self.bb = KEEP * self.bb + batch * batch
        self.bc = KEEP * self.bc + batch * context
        self.cc = KEEP * self.cc + context * context
        self.bs = KEEP * self.bs + batch * seconds
        self.cs = KEEP * self.cs + context * seconds

    def seconds(self, batch: float, context: float, step_s: float, noise: float) -> float:
        """Of one token, where steps with so large a batch and context take so long; as much of it
        as is certain. `noise`: relative error of an observation."""
        if not context or not self.n:
            return 0.0
        bb = self.bb + self.n * (RIDGE * batch) ** 2
        cc = self.cc + self.n * (RIDGE * context) ** 2
        spread = cc - self.bc * self.bc / bb
        error = max(noise, LEAST_NOISE) * step_s / math.sqrt(spread)
        each = (self.cs - self.bs * self.bc / bb) / spread - SURE * error
        return min(max(0.0, each), MOST * step_s / context)
