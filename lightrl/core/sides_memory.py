"""What is learned of devices that change sides, as it outlives the coordinator. Values only."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from lightrl.core.line_fit import LineFit

REMEMBERED = 5  # measurements; their median stands for all: one that a clock spoilt does no harm


class Recent:
    """The newest measurements of one thing."""

    def __init__(self, values: tuple[float, ...] = ()) -> None:
        self._values: deque[float] = deque(values, maxlen=REMEMBERED)

    def add(self, value: float) -> None:
        if value >= 0:
            self._values.append(value)

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self._values)

    @property
    def value(self) -> float | None:
        return median(self._values) if self._values else None


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The lengths of a round's responses, and when its groups were complete; in tokens."""

    # raw int32
    lengths: bytes = b""
    ends: tuple[int, ...] = ()
    # of what was trained
    longest: int = 0


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """What the rule "window" remembers, by kind of round."""

    seeds: dict[str, float] = field(default_factory=dict[str, float])
    # (nodes that share nothing, kind of round, seconds)
    known: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SidesMemory:
    """Example: SidesMemory((0.6, 0.7), rounds={"short": RoundShape(...)})"""

    # seconds of the last switches
    switches: tuple[float, ...] = ()
    # seconds of the trainer, by tokens of a step
    training: LineFit = field(default_factory=LineFit)
    # the last ones, by kind
    rounds: dict[str, RoundShape] = field(default_factory=dict[str, RoundShape])
    # (seconds of all nodes that sampled, of training) of the last steps, by kind
    work: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    window: WindowMemory = field(default_factory=WindowMemory)
