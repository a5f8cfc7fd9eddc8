"""Restart policy of daemons, engines, ranks, reward workers and Slurm jobs, each with its limits.

Pure: counts crashes and returns pauses. Its users decide what counts as progress.
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
    # before the first restart
    first_pause_s: float = 0.0
    # factor of each further pause
    growth: float = 1.0
    longest_pause_s: float = inf
    # a process that lived longer resets the count
    settled_s: float = inf

    def pause_s(self, num_crashes: int) -> float | None:
        """Return the pause after `num_crashes` in a row; None means give up."""
        if num_crashes > self.max_restarts:
            return None
        return min(self.first_pause_s * self.growth ** (num_crashes - 1), self.longest_pause_s)


class CrashCounter:
    """Counts crashes in a row of one process."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.in_a_row = 0

    def crashed(self, lived_s: float = 0.0) -> float | None:
        """Count a crash, and return the pause before the restart; None means give up."""
        if lived_s > self.policy.settled_s:
            self.in_a_row = 0
        self.in_a_row += 1
        return self.policy.pause_s(self.in_a_row)

    @property
    def is_given_up(self) -> bool:
        return self.in_a_row > self.policy.max_restarts

    def progressed(self) -> None:
        """Reset the count."""
        self.in_a_row = 0
