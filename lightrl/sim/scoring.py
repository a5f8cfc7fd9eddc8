"""Rewards in virtual time: when a response's score is known. Owns the reward workers, nothing
else."""

import heapq
from collections.abc import Iterable

from lightrl.core.state import Response
from lightrl.sim.workload import RewardTimes, uniforms

SHARE_RIGHT = 0.5  # of the responses


class SimScoring:
    def __init__(self, times: RewardTimes) -> None:
        self._times = times
        # One heap for each class of rewards: when its workers are free; empty = as many as needed.
        self._free_at = [[0.0] * round(c.workers * c.beside) for c in times.classes]

    def done_at(self, now: float, prompt: str, noise: int) -> float:
        """When the next free worker has scored it, while nodes still sample."""
        kind = self._times.kind(prompt)
        seconds = self._times.seconds(prompt, noise) * self._times.classes[kind].beside
        return _next(self._free_at[kind], now, seconds) + self._times.told_s

    def all_done_at(self, now: float, responses: Iterable[Response]) -> float:
        """When all are scored, if that begins now: one class of rewards after the other."""
        by_kind: list[list[float]] = [[] for _ in self._times.classes]
        for response in responses:
            prompt = response.group.prompt.id
            by_kind[self._times.kind(prompt)].append(self._times.seconds(prompt, response.seed))
        for chosen, tasks in zip(self._times.classes, by_kind, strict=True):
            free_at = [now] * chosen.workers
            now = max((_next(free_at, now, seconds) for seconds in tasks), default=now)
        return now


def _next(free_at: list[float], now: float, seconds: float) -> float:
    """When the task is done that the worker who is free first begins."""
    if not free_at:
        return now + seconds
    done = max(now, free_at[0]) + seconds
    heapq.heapreplace(free_at, done)
    return done


def reward(noise: int) -> float:
    """Right or wrong, by the response's noise."""
    return float(uniforms("reward", noise)[0] < SHARE_RIGHT)
