"""How fast a node decodes, learned from the chunks that it sends. Owns one small regression, no policy."""

from dataclasses import dataclass

PRIOR_STEP_S = 0.02  # before anything was heard of a node
PRIOR_HALF_BATCH = 128  # responses at which an engine step takes twice as long as with one
FORGET = 0.98  # weight of the past at every observation
PRIOR_WEIGHT = 0.05  # of the assumed shape against one observation


@dataclass(slots=True)
class Speed:
    """Seconds of one engine step with B responses: step_s(B) = base + slope * B.

    Least squares over (B, seconds per token and response) with exponential forgetting. Where only one
    batch size was seen the slope is undetermined: a weak prior keeps the assumed ratio of slope to base.
    """

    base: float = PRIOR_STEP_S
    slope: float = PRIOR_STEP_S / PRIOR_HALF_BATCH
    num_observed: int = 0
    _n: float = 0.0  # decayed sums
    _x: float = 0.0
    _xx: float = 0.0
    _y: float = 0.0
    _xy: float = 0.0

    def observe(self, batch: int, seconds_per_token: float) -> None:
        """With `batch` responses running, each got one more token every `seconds_per_token`."""
        x, y = float(batch), seconds_per_token
        self._n = FORGET * self._n + 1
        self._x = FORGET * self._x + x
        self._xx = FORGET * self._xx + x * x
        self._y = FORGET * self._y + y
        self._xy = FORGET * self._xy + x * y
        self.num_observed += 1
        mean_x, mean_y = self._x / self._n, self._y / self._n
        # The prior in terms of what was measured: base = slope * PRIOR_HALF_BATCH.
        assumed = mean_y / (PRIOR_HALF_BATCH + mean_x)
        spread = self._xx / self._n - mean_x * mean_x
        together = self._xy / self._n - mean_x * mean_y
        weight = PRIOR_WEIGHT * PRIOR_HALF_BATCH
        slope = (together + weight * assumed) / (max(0.0, spread) + weight)
        self.slope = min(max(0.0, slope), 0.95 * mean_y / max(1.0, mean_x))
        self.base = mean_y - self.slope * mean_x

    def step_s(self, batch: int) -> float:
        """Seconds until each of `batch` responses has one more token."""
        return self.base + self.slope * batch
