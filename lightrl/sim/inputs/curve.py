"""A piecewise linear curve of seconds of an engine step by its batch."""

from bisect import bisect_right
from dataclasses import dataclass


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
