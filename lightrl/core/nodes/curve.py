"""A piecewise linear curve of seconds by batch: the time of a step and the resulting throughput.

Owns only the geometry. `speed.py` learns the knots. `LineFit`, a line with forgetting, fits seconds
of training (`sharing_policy.py`).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

HARDLY = 0.1  # of the best throughput; smaller differences count as none


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one engine step, non-decreasing in the batch.

    `batches` begins with 1 and rises; `seconds` are the values at these batches; `slopes[i]` are
    seconds for one more response from `batches[i]` on; the last slope has no end.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    slopes: tuple[float, ...]

    def at(self, batch: float) -> float:
        i = max(0, bisect_right(self.batches, batch) - 1) if len(self.batches) > 1 else 0
        return self.seconds[i] + self.slopes[i] * (batch - self.batches[i])

    def scaled(self, factor: float) -> "Curve":
        """Return the curve with all times multiplied by `factor`."""
        seconds, slopes = (tuple(factor * x for x in many) for many in (self.seconds, self.slopes))
        return Curve(self.batches, seconds, slopes)

    def finishes_in(self, left: Sequence[float]) -> float:
        """Return the seconds until all responses are done, given their remaining steps, ascending.

        While j of them run a step takes at(j). Summed over steps that is at(1) times the most
        steps, plus, for each response in descending order of steps, the seconds by which it makes
        its own steps longer.
        """
        num = len(left)
        if not num:
            return 0.0
        total, last = self.seconds[0] * left[-1], len(self.batches) - 1
        for i, low in enumerate(self.batches):
            if low >= num:
                break
            high = num if i == last else min(num, self.batches[i + 1])
            total += self.slopes[i] * sum(left[num - high : num - low])
        return total

    def best_rate(self, limit: int) -> float:
        """Return the most tokens per second with up to `limit` responses."""
        ends = [b for b in self.batches if b < limit]
        return max(b / self.at(b) for b in (*ends, limit))

    def peak(self, limit: int) -> int:
        """Return the largest batch before throughput falls off, at most `limit`."""
        best = self.best_rate(limit)
        wanted, is_reached = best * (1 - HARDLY), False
        for low, high, seconds, slope in self._segments(limit):
            is_reached |= low / seconds >= best * (1 - 1e-9)
            if is_reached and high / self.at(high) < wanted:
                return max(low, min(high, math.floor(_crossing(wanted, low, seconds, slope))))
        return limit

    def _segments(self, limit: int) -> list[tuple[int, int, float, float]]:
        """Return (first batch, last batch, seconds at the first, slope) of each segment."""
        highs = (*self.batches[1:], limit)
        rows = zip(self.batches, highs, self.seconds, self.slopes, strict=True)
        return [(low, min(high, limit), s, k) for low, high, s, k in rows if low < limit]


def _crossing(rate: float, low: int, seconds: float, slope: float) -> float:
    """Return the batch on a segment that yields `rate` tokens per second."""
    per_response = 1 - slope * rate
    if abs(per_response) < 1e-12:
        return low
    return rate * (seconds - slope * low) / per_response


def rising(points: Sequence[tuple[int, float, float]], slope: float) -> Curve:
    """Return the curve through (batch, seconds, weight), in order of batches; `slope` beyond both
    ends. Where a larger batch is faster, both get their mean (pool adjacent violators)."""
    pools: list[tuple[float, float, list[int]]] = []  # (seconds, weight, batches)
    for batch, seconds, weight in points:
        pool = (seconds, weight, [batch])
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            both = before[1] + pool[1]
            mean = (before[0] * before[1] + pool[0] * pool[1]) / both
            pool = (mean, both, before[2] + pool[2])
        pools.append(pool)
    batches = [b for _, _, many in pools for b in many]
    values = [s for s, _, many in pools for _ in many]
    if batches[0] > 1:
        # limits the slope: the first response takes at least 5 % of the next knot
        values.insert(0, max(values[0] - slope * (batches[0] - 1), 0.05 * values[0]))
        batches.insert(0, 1)
    slopes = [
        (values[i + 1] - values[i]) / (batches[i + 1] - batches[i]) for i in range(len(values) - 1)
    ]
    return Curve(tuple(batches), tuple(values), (*slopes, slope))


@dataclass(slots=True)
class LineFit:
    """Least squares of y over x with exponential forgetting. Call `add` before other methods.

    With a single x the slope is undetermined: a prior with `weight`, in units of the variance of
    x, determines it.
    """

    # decayed sums
    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, keep: float) -> None:
        """Add an observation; `keep` is the weight of all earlier ones."""
        self.n = keep * self.n + 1
        self.x = keep * self.x + x
        self.xx = keep * self.xx + x * x
        self.y = keep * self.y + y
        self.xy = keep * self.xy + x * y

    def means(self) -> tuple[float, float]:
        """Return the means of x and y, a point of the line."""
        return self.x / self.n, self.y / self.n

    def slope(self, prior: float, weight: float) -> float:
        mean_x, mean_y = self.means()
        spread = self.xx / self.n - mean_x * mean_x
        together = self.xy / self.n - mean_x * mean_y
        return (together + weight * prior) / (max(0.0, spread) + weight)

    def at(self, x: float) -> float:
        mean_x, mean_y = self.means()
        slope = self.slope(mean_y / mean_x, 0.01 * mean_x * mean_x)
        return mean_y + min(max(0.0, slope), mean_y / mean_x) * (x - mean_x)
