"""A curve of seconds against batch, straight between knots: what a step takes, what a throughput
follows from it.

Owns the geometry alone. Where the knots are is learned in `speed.py`.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

HARDLY = 0.1  # of the best throughput; what is nearer to it counts as equal


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one engine step; it never falls with the batch.

    `batches` begins with 1 and rises; `seconds` are those there; `slopes[i]` are seconds for one
    more response from `batches[i]` on, the last of them for ever.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    slopes: tuple[float, ...]

    def at(self, batch: float) -> float:
        i = max(0, bisect_right(self.batches, batch) - 1) if len(self.batches) > 1 else 0
        return self.seconds[i] + self.slopes[i] * (batch - self.batches[i])

    def scaled(self, factor: float) -> "Curve":
        """Everything takes so many times as long."""
        seconds, slopes = (tuple(factor * x for x in many) for many in (self.seconds, self.slopes))
        return Curve(self.batches, seconds, slopes)

    def finishes_in(self, left: Sequence[float]) -> float:
        """Seconds until all responses are done that have so many steps left, fewest first.

        While j of them run a step takes at(j). Summed over steps that is at(1) times the most
        steps, and for each response the seconds by which it makes its own steps longer, that with
        most steps first.
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
        """The most tokens a second with up to `limit` responses."""
        ends = [b for b in self.batches if b < limit]
        return max(b / self.at(b) for b in (*ends, limit))

    def peak(self, limit: int) -> int:
        """The largest batch before throughput falls off; `limit` where it does not."""
        best = self.best_rate(limit)
        wanted, is_reached = best * (1 - HARDLY), False
        for low, high, seconds, slope in self._segments(limit):
            is_reached |= low / seconds >= best * (1 - 1e-9)
            if is_reached and high / self.at(high) < wanted:
                return max(low, min(high, math.floor(_crossing(wanted, low, seconds, slope))))
        return limit

    def _segments(self, limit: int) -> list[tuple[int, int, float, float]]:
        """(first batch, last batch, seconds at the first, slope)"""
        highs = (*self.batches[1:], limit)
        rows = zip(self.batches, highs, self.seconds, self.slopes, strict=True)
        return [(low, min(high, limit), s, k) for low, high, s, k in rows if low < limit]


def _crossing(rate: float, low: int, seconds: float, slope: float) -> float:
    """The batch on a segment that brings so many tokens a second."""
    per_response = 1 - slope * rate
    if abs(per_response) < 1e-12:
        return low
    return rate * (seconds - slope * low) / per_response


def rising(points: Sequence[tuple[int, float, float]], slope: float) -> Curve:
    """The curve through (batch, seconds, weight), in order of batches; `slope` beyond both ends.

    Where a larger batch seems faster, both get their mean (pool adjacent violators).
    """
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
        # however steep: something is left for the first response
        values.insert(0, max(values[0] - slope * (batches[0] - 1), 0.05 * values[0]))
        batches.insert(0, 1)
    slopes = [
        (values[i + 1] - values[i]) / (batches[i + 1] - batches[i]) for i in range(len(values) - 1)
    ]
    return Curve(tuple(batches), tuple(values), (*slopes, slope))


@dataclass(slots=True)
class LineFit:
    """Least squares of y over x with exponential forgetting. Call `add` before anything else.

    Where only one x was seen the slope is undetermined: a prior that counts as `weight` of the
    spread of x (its variance) fills in.
    """

    # decayed sums
    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, keep: float) -> None:
        """`keep`: the weight of all that was observed before."""
        self.n = keep * self.n + 1
        self.x = keep * self.x + x
        self.xx = keep * self.xx + x * x
        self.y = keep * self.y + y
        self.xy = keep * self.xy + x * y

    def means(self) -> tuple[float, float]:
        """Of x and of y; the line goes through this point."""
        return self.x / self.n, self.y / self.n

    def slope(self, prior: float, weight: float) -> float:
        mean_x, mean_y = self.means()
        spread = self.xx / self.n - mean_x * mean_x
        together = self.xy / self.n - mean_x * mean_y
        return (together + weight * prior) / (max(0.0, spread) + weight)
