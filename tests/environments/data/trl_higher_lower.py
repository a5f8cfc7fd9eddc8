"""A class as TRL's `environment_factory` takes it: its documentation describes the interface."""

import random


class HigherLower:
    def __init__(self, highest: int = 20) -> None:
        self._highest = highest
        self.reward = 0.0

    def reset(self, **row) -> str | None:
        self.number = row.get("number") or random.randint(1, self._highest)
        self.reward = 0.0
        return f" The number is between 1 and {self._highest}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.

        Returns:
            The feedback.
        """
        if not 1 <= number <= self._highest:
            raise ValueError(f"{number} is out of range.")
        self.reward = 1.0 if number == self.number else 0.1
        return "Right." if number == self.number else f"It is {self._compared(number)}."

    async def wait(self, seconds: float = 0.0) -> dict:
        """Wait before the next guess.

        Args:
            seconds: How long.
        """
        if seconds < 0:
            raise ValueError("seconds is negative.")
        return {"waited": seconds}

    def _compared(self, number: int) -> str:
        return "higher" if self.number > number else "lower"


class Scored(HigherLower):
    async def get_reward(self) -> float:
        return 2 * self.reward
