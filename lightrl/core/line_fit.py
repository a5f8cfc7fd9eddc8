"""A line through what was observed, the newest counting most: how long a step takes with so many
responses.

Owns five decayed sums. Its users give the slope to assume while it cannot be known.
"""

from dataclasses import dataclass


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
