"""Estimate the seconds of an engine step at a node from the chunks that the node sends.

Owns the estimate, no policy.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from lightrl.core.nodes.line_fit import LineFit

PRIOR_STEP_S = 0.02  # before the first chunk of a node
PRIOR_HALF_BATCH = 128  # responses at which an engine step takes twice as long as with one
PRIOR_BATCH, PRIOR_STEPS = 32, 4.0  # the prior counts as so many observed steps with this batch
MEMORY_STEPS = 128.0  # after which an observed step counts e times less
# Of batches (relative, squared): with less the prior determines the slope, as contexts grow while
# batches shrink.
SPREAD = 0.2
# Times the expected seconds, of at least so many steps; such observations in a row that count.
STALL, STALL_STEPS, STALLS = 4.0, 16, 3
LEAST_BASE = 0.05  # of a step with the mean batch
ERROR, LEAST_ERROR = 0.1, 0.02  # relative error of a step: without observations, and at least


class Speed:
    """Seconds of an engine step with B responses: base + slope * B, as of late.

    A step samples a token of each response. The seconds and the tokens of chunks are summed, so
    that a chunk with tokens of few responses, and the next one with all, count as they should.
    """

    __slots__ = ("_fit", "_num_stalls", "_prior", "base", "num_observed", "slope")

    def __init__(
        self,
        base: float = PRIOR_STEP_S,
        slope: float = PRIOR_STEP_S / PRIOR_HALF_BATCH,
        num_observed: int = 0,
    ) -> None:
        self.base, self.slope, self.num_observed = base, slope, num_observed
        self._prior = base, slope
        self._fit, self._num_stalls = LineFit(), 0
        seconds = PRIOR_STEPS * self.step_s(PRIOR_BATCH)
        self._fit.add(PRIOR_BATCH, seconds, 0.0, PRIOR_STEPS)

    @classmethod
    def like(cls, others: Iterable["Speed"]) -> "Speed":
        """Return the speed to expect of a node like `others`."""
        known = [s for s in others if s.num_observed]
        return cls(fmean(s.base for s in known), fmean(s.slope for s in known)) if known else cls()

    def observe(self, batch: int, seconds: float, steps: float = 1.0) -> None:
        """Add an observation: `seconds` for so many steps with `batch` responses.

        A single one that is far too long is a pause, as while weights are loaded; the third in a
        row, and those after it, are of a node that has become slow.
        """
        longest = STALL * max(steps, STALL_STEPS) * self.step_s(batch)
        is_stall = self.num_observed > 0 and seconds > longest
        self._num_stalls = self._num_stalls + 1 if is_stall else 0
        if 0 < self._num_stalls < STALLS:
            return
        self.num_observed += 1
        self._fit.add(batch, seconds, math.exp(-steps / MEMORY_STEPS), steps)
        mean, mean_s = self._fit.means()
        prior_slope = self._prior[1] / (self._prior[0] + self._prior[1] * mean)
        slope = self._fit.slope(prior_slope * mean_s, SPREAD * mean * mean)
        self.slope = min(max(0.0, slope), (1 - LEAST_BASE) * mean_s / mean)
        self.base = mean_s - self.slope * mean

    def step_s(self, batch: int) -> float:
        """Return seconds of a step with `batch` responses."""
        return self.base + self.slope * batch

    def finishes_in(self, left: Sequence[float], more: float = 0.0) -> float:
        """Return seconds until all responses are done, given remaining steps, fewest first, and
        those of one more: base for the steps of the longest, and slope for each step of each."""
        longest = max(left[-1], more) if left else more
        return self.base * longest + self.slope * (sum(left) + more)

    @property
    def error(self) -> float:
        """The standard error of `step_s`, as a share of it."""
        return max(LEAST_ERROR, ERROR / math.sqrt(1 + self.num_observed))
