"""Rewards in virtual time: when a response's score is known. Owns the reward workers, nothing else."""

import heapq
from collections.abc import Iterable

from lightrl.core.state import Response
from lightrl.sim.workload import RewardTimes, uniforms

SHARE_RIGHT = 0.5  # of the responses


class Scoring:
    def __init__(self, times: RewardTimes) -> None:
        self._times = times
        self._free_at = [0.0] * times.workers  # a heap; empty = there are as many as needed

    def done_at(self, now: float, prompt: str, noise: int) -> float:
        """When the next free worker has scored it."""
        seconds = self._times.seconds(prompt, noise)
        if not self._free_at:
            return now + seconds
        done = max(now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, done)
        return done

    def all_done_at(self, now: float, responses: Iterable[Response]) -> float:
        """When all are scored, if that begins now."""
        return max((self.done_at(now, r.group.prompt.id, r.seed) for r in responses), default=now)


def reward(noise: int) -> float:
    """Right or wrong, by the response's noise."""
    return float(uniforms("reward", noise)[0] < SHARE_RIGHT)
