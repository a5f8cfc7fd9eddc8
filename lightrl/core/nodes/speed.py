"""Estimate the seconds of an engine step at a node from the chunks that the node sends.

Owns the estimate, no policy. `chunk_stats` estimates the tokens of a response in a step, one
without speculation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lightrl.core.nodes.curve import HARDLY, Curve, rising

PRIOR_STEP_S = 0.02  # before the first chunk of a node
PRIOR_HALF_BATCH = 128  # responses at which an engine step takes twice as long as with one
MAX_WEIGHT = 50.0  # observations in the mean of a bucket: older ones decay
PRIOR_WEIGHT = 0.05  # of the assumed slope against one observation, in units of PRIOR_HALF_BATCH
ASSUMED = 0.25  # observations for which the line counts in a bucket
# Relative errors: of a node without observations, of an observation before some were compared, at
# least, and for each bucket of distance to the nearest one with observations.
PRIOR_ERROR = 0.1
PRIOR_NOISE = 0.05
LEAST_ERROR = 0.01
UNSEEN_ERROR = 0.025
# A node has become slow, or fast, if three of four observations differ by this much from their
# buckets, and by twice the noise; fewer such observations are ignored.
SURPRISING = 0.25
NUM_SURPRISES, RECENT = 3, 4
MAX_CHANGE = 4.0  # times as fast or slow because of them
TRUSTED = 3.0  # observations of a bucket before a surprise counts
SLOWED = 1.25  # times as long as before: the node has become slow
# Contexts that differ by less (squared, relative) do not determine the cost of a token, which is at
# most the rest of a step.
LEAST_SPREAD = 0.02
LEAST = 0.2
REMADE_AFTER = 8  # observations until the curve is made again
ALIKE_BATCH = 32  # with which nodes are compared


@dataclass(slots=True)
class _Bucket:
    """Steps with nearly as large a batch: decayed count, and means."""

    weight: float = 0.0
    batch: float = 0.0
    # tokens, of all responses
    context: float = 0.0
    seconds: float = 0.0


def size_of(batch: int) -> int:
    """Return the bucket of a batch: four for each power of two: 8 and 9, 10 and 11, 12 and 13, 14
    and 15, 16 to 19, ..."""
    bits = batch.bit_length()
    return 4 * bits + (batch >> (bits - 3) & 3 if bits > 2 else batch - (1 << bits - 1))


class Speed:
    """Seconds of an engine step against its batch: means by bucket, made to rise with the batch,
    and a straight line beyond the buckets that were observed.

    Contexts are as they were observed with that batch. A node that changes its speed changes it in
    all buckets.
    """

    __slots__ = (
        "_buckets",
        "_context",
        "_curve",
        "_has_slowed",
        "_line",
        "_noise",
        "_odd",
        "_peak",
        "_remade_at",
        "_sums",
        "num_observed",
    )  # fmt: skip

    def __init__(
        self,
        base: float = PRIOR_STEP_S,
        slope: float = PRIOR_STEP_S / PRIOR_HALF_BATCH,
        num_observed: int = 0,
    ) -> None:
        """Seconds: `base` + `slope` for each response."""
        self.num_observed = num_observed
        self._line = base, slope
        self._buckets: dict[int, _Bucket] = {}
        self._noise = PRIOR_NOISE**2  # decayed mean square of relative errors
        self._odd: list[tuple[int, float]] = []  # surprises lately: (observation, log)
        self._has_slowed = False
        self._context = 0.0
        self._sums = [0.0, 0.0, 0.0]  # see `_token_s`
        self._curve: Curve | None = None
        self._remade_at = 0  # the observation after which the curve is made again
        self._peak: tuple[int, int] | None = None  # of the curve, up to the first number

    @classmethod
    def like(cls, others: Iterable["Speed"]) -> "Speed":
        """Return the speed to expect of a node like `others`: the curve of the one with most
        observations, at their mean level."""
        known = [s for s in others if s.num_observed]
        if not known:
            return cls()
        best = max(known, key=lambda s: s.num_observed)
        factor = fmean(s.step_s(ALIKE_BATCH) for s in known) / best.step_s(ALIKE_BATCH)
        speed = cls(best.base * factor, best.slope * factor)
        for size, bucket in best._buckets.items():
            seconds, weight = bucket.seconds * factor, min(bucket.weight, TRUSTED)
            speed._buckets[size] = replace(bucket, seconds=seconds, weight=weight)
        return speed

    def observe(self, batch: int, seconds: float, context: float = 0.0) -> None:
        """Add an observation: a step with `batch` responses, which held `context` tokens in all,
        took `seconds`."""
        self.num_observed += 1
        self._context += (context / batch - self._context) / min(self.num_observed, MAX_WEIGHT)
        bucket = self._buckets.get(size := size_of(batch)) or _Bucket()
        if bucket.weight >= TRUSTED:
            log = math.log(max(seconds, 1e-9) / self._at(bucket, context))
            if log * log > max(SURPRISING**2, 4 * self._noise):
                if not self._has_changed(log):
                    return
                bucket.weight = TRUSTED
            self._noise += (min(log * log, SURPRISING**2) - self._noise) / MAX_WEIGHT
        self._buckets[size] = bucket
        bucket.weight = min(bucket.weight + 1, MAX_WEIGHT)
        c, s = context - bucket.context, seconds - bucket.seconds
        bucket.batch += (batch - bucket.batch) / bucket.weight
        bucket.context += c / bucket.weight
        bucket.seconds += s / bucket.weight
        if bucket.weight > TRUSTED:
            for k, product in enumerate((c * c, c * s, context * context)):
                self._sums[k] += product - self._sums[k] / MAX_WEIGHT

    @property
    def _token_s(self) -> float:
        """Seconds that a token of context adds to a step, by deviations from the means of buckets;
        0 while contexts hardly differ."""
        cc, cs, squares = self._sums
        return max(0.0, cs / (cc + LEAST_SPREAD * squares)) if squares else 0.0

    def _at(self, bucket: _Bucket, context: float) -> float:
        """Return seconds of a step of a bucket with `context` tokens."""
        seconds = bucket.seconds + self._token_s * (context - bucket.context)
        return max(seconds, LEAST * bucket.seconds)

    def _has_changed(self, log: float) -> bool:
        """Scale all buckets at the third surprise of the same sign in RECENT observations."""
        first = self.num_observed - RECENT
        alike = [(k, odd) for k, odd in self._odd if k > first and odd * log > 0]
        for _, odd in self._odd[: len(self._odd) - len(alike)]:  # these were noise
            self._noise += (min(odd * odd, 1.0) - self._noise) / MAX_WEIGHT
        self._odd = [*alike, (self.num_observed, log)]
        if len(self._odd) < NUM_SURPRISES:
            return False
        least = min((odd for _, odd in self._odd), key=abs)
        ratio = math.exp(max(-math.log(MAX_CHANGE), min(least, math.log(MAX_CHANGE))))
        for bucket in self._buckets.values():
            bucket.seconds *= ratio
        self._has_slowed, self._odd, self._curve = ratio > SLOWED, [], None
        return True

    def has_become_slow(self) -> bool:
        """Return whether steps take much longer since the last call."""
        has_slowed, self._has_slowed = self._has_slowed, False
        return has_slowed

    # The estimate

    @property
    def curve(self) -> Curve:
        """Seconds of a step against its batch, with contexts as of late."""
        if self._curve is None or self.num_observed >= self._remade_at:
            self._fit()
            base, slope = self._line
            buckets = sorted(self._buckets.values(), key=lambda b: b.batch)
            points = [(int(b.batch), self._expected_s(b), b.weight) for b in buckets]
            known = rising(points, slope) if points else Curve((1,), (base + slope,), (slope,))
            self._curve, self._peak = known, None
            self._remade_at = self.num_observed + 1 + min(REMADE_AFTER, self.num_observed // 4)
        return self._curve

    def _expected_s(self, bucket: _Bucket) -> float:
        """Return seconds of a step of a bucket; the line counts as ASSUMED observations of it."""
        seconds = self._at(bucket, self._context * bucket.batch)
        assumed = self._line[0] + self._line[1] * bucket.batch
        return (bucket.weight * seconds + ASSUMED * assumed) / (bucket.weight + ASSUMED)

    def _fit(self) -> None:
        """Fit a line through the buckets; where they hold one size only, the assumed ratio of base
        to slope decides."""
        buckets = self._buckets.values()
        if not (n := sum(b.weight for b in buckets)):
            return
        x = sum(b.weight * b.batch for b in buckets) / n
        y = sum(b.weight * b.seconds for b in buckets) / n
        spread = sum(b.weight * (b.batch - x) ** 2 for b in buckets) / n
        rise = sum(b.weight * (b.batch - x) * (b.seconds - y) for b in buckets) / n
        weight = PRIOR_WEIGHT * PRIOR_HALF_BATCH
        slope = (rise + weight * y / (PRIOR_HALF_BATCH + x)) / (spread + weight)
        slope = min(max(0.0, slope), 0.95 * y / max(1.0, x))
        self._line = y - slope * x, slope

    @property
    def base(self) -> float:
        """Seconds of a step by the line, without responses."""
        self._fit()
        return self._line[0]

    @property
    def slope(self) -> float:
        """Seconds that one more response adds by the line."""
        self._fit()
        return self._line[1]

    def step_s(self, batch: int) -> float:
        """Return seconds of a step with `batch` responses."""
        return self.curve.at(batch)

    def finishes_in(self, left: Sequence[float]) -> float:
        """Return seconds until all responses are done, given remaining steps, fewest first."""
        return self.curve.finishes_in(left)

    def peak(self, limit: int) -> int:
        """Return the largest batch up to `limit` before throughput falls off by more than the error
        of the estimate."""
        if len(self._buckets) < 2:
            return limit
        curve = self.curve
        if self._peak is None or self._peak[0] != limit:
            peak = curve.peak(limit)
            self._peak = limit, peak if 2 * self.error(peak + 1) < HARDLY else limit
        return self._peak[1]

    def error(self, batch: int) -> float:
        """Return the standard error of step_s(batch), as a share of it."""
        if not self._buckets:
            return PRIOR_ERROR
        size = size_of(batch)
        nearest = min(self._buckets, key=lambda known: abs(known - size))
        seen = math.sqrt(self._noise / self._buckets[nearest].weight)
        return max(LEAST_ERROR, seen) + UNSEEN_ERROR * abs(nearest - size)
