"""How often in a row, and after which pause, what died is started again: daemons, engines, ranks,
reward workers and Slurm's jobs all follow one policy, each with its own limits.

Pure: owns the limits and the count. Never starts anything, waits or reads a clock. Its users decide
what counts as progress and what is reported.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Example: RestartPolicy(5, first_pause_s=0.2, growth=2.0, longest_pause_s=2.0) waits 0.2, 0.4,
    0.8, 1.6 and 2.0 s; the sixth crash in a row is the last.
    """

    # in a row
    max_restarts: int
    # before the first restart; 0 = at once
    first_pause_s: float = 0.0
    # of each further pause, against the one before
    growth: float = 1.0
    longest_pause_s: float = inf
    # a crash after a longer life than this begins a new row
    settled_s: float = inf

    def pause_s(self, num_crashes: int) -> float | None:
        """Before the restart that follows so many crashes in a row; None = give up."""
        if num_crashes > self.max_restarts:
            return None
        return min(self.first_pause_s * self.growth ** (num_crashes - 1), self.longest_pause_s)


class CrashCounter:
    """The crashes in a row of one thing that is started again and again."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.in_a_row = 0

    def crashed(self, lived_s: float = 0.0) -> float | None:
        """Counts a crash. Returns the seconds to wait before the restart; None = give up."""
        if lived_s > self.policy.settled_s:
            self.in_a_row = 0
        self.in_a_row += 1
        return self.policy.pause_s(self.in_a_row)

    @property
    def is_given_up(self) -> bool:
        return self.in_a_row > self.policy.max_restarts

    def progressed(self) -> None:
        """What was wrong is over: the next crash begins a new row."""
        self.in_a_row = 0
