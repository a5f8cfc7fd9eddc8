"""A straight line through observations, of which the newest count most."""

from dataclasses import dataclass


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

    def add(self, x: float, y: float, keep: float, weight: float = 1.0) -> None:
        """Add `weight` observations at `x`, whose sum is `y`; `keep` is the weight of all earlier
        ones."""
        self.n = keep * self.n + weight
        self.x = keep * self.x + weight * x
        self.xx = keep * self.xx + weight * x * x
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
        """Return y at `x`, as if y was in proportion to x where all observations have one x."""
        mean_x, mean_y = self.means()
        slope = self.slope(mean_y / mean_x, 0.01 * mean_x * mean_x)
        return mean_y + min(max(0.0, slope), mean_y / mean_x) * (x - mean_x)
