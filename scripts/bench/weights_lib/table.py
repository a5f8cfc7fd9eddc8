"""What every part of the benchmark yields, and how it is shown."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    sizes: tuple[int, ...]  # MB
    repeat: int
    streams: int
    line: float  # bytes/s of each joiner
    joiners_mb: int
    loops_mb: int


@dataclass(frozen=True)
class Row:
    """A figure beside its ceiling. `ratio` is to be at least or at most `goal`; None = no goal."""

    part: str
    what: str
    mb: int
    value: float
    unit: str
    ceiling: float | None = None
    goal: float | None = None
    is_at_most: bool = False

    @property
    def ratio(self) -> float | None:
        return self.value / self.ceiling if self.ceiling else None

    @property
    def is_met(self) -> bool | None:
        if self.ratio is None or self.goal is None:
            return None
        return self.ratio <= self.goal if self.is_at_most else self.ratio >= self.goal

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "is_met": self.is_met}


def header() -> str:
    titles = f"{'value':>9} {'unit':>5} {'ceiling':>8} {'ratio':>6}  goal"
    return f"{'part':8} {'what':46} {'MB':>5} {titles}"


def show(row: Row) -> str:
    ceiling = "" if row.ceiling is None else f"{row.ceiling:.3g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    goal = ""
    if row.goal is not None:
        met = {True: "met", False: "MISSED", None: ""}[row.is_met]
        goal = f"{'<=' if row.is_at_most else '>='} {row.goal:g} {met}"
    return (
        f"{row.part:8} {row.what:46} {row.mb:5} {row.value:9.3g} {row.unit:>5} {ceiling:>8} "
        f"{ratio:>6}  {goal}"
    )
