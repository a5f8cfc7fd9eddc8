"""What simulated responses will be: their lengths, their rewards, and when these are known."""

import heapq
from collections.abc import Sequence

from lightrl.core.settings import EvalSet
from lightrl.core.state import DrawnPrompt, Response
from lightrl.sim.inputs.workload import RewardTimes, Workload, uniforms

SHARE_RIGHT = 0.5  # of the responses


class Lengths:
    """The length of each response. Under newer weights the same noise may give another sample, so
    this stores the step in which a response was first generated."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._first_step: dict[str, int] = {}

    def current(self, response: Response) -> int:
        """Return its length if it is generated now."""
        return self.of(response, self._noise(response))

    def of(self, response: Response, noise: int) -> int:
        """Return its length in tokens, at most the limit of its group."""
        group = response.group
        prompt, lengths = group.prompt, self._workload.lengths
        limit = group.max_response_tokens
        return lengths.length(prompt.id, prompt.epoch, noise, limit, group.id, response.index)

    def _noise(self, response: Response) -> int:
        step = response.group.round.step
        if response.carried:
            step = response.group.since  # it continues the sample of that step
        first, again = self._first_step.setdefault(response.id, step), self._workload.same_again
        if first == step or again >= 1 or uniforms("again", response.seed, step)[0] < again:
            return response.seed
        return response.seed ^ (step << 64)


def eval_prompts(sets: Sequence[EvalSet], tokens: bytes) -> tuple[DrawnPrompt, ...]:
    """Return the prompts of all sets, each with these tokens."""
    return tuple(
        DrawnPrompt(f"{one.name}/{i}", 0, tokens) for one in sets for i in range(one.num_prompts)
    )


def reward(noise: int) -> float:
    """Return 0 or 1, by the response's noise."""
    return float(uniforms("reward", noise)[0] < SHARE_RIGHT)


class RewardWorkers:
    """Compute the time at which the reward of a response is known."""

    def __init__(self, times: RewardTimes) -> None:
        self._times = times
        # one heap for each class of rewards: when its workers are free; empty = unlimited
        self._free_at = [[0.0] * round(c.workers * c.beside) for c in times.classes]
        self._deferred: dict[str, Response] = {}

    def done_at(self, now: float, prompt: str, noise: int) -> float:
        """Return when the next free worker has scored it, while nodes still sample."""
        kind = self._times.kind(prompt)
        seconds = self._times.seconds(prompt, noise) * self._times.classes[kind].beside
        return _next(self._free_at[kind], now, seconds) + self._times.overhead_s

    def defer(self, response: Response) -> None:
        """Compute this reward after the rollout, for comparison. The core gets the score
        immediately; the time that all of them take is added to the step."""
        self._deferred[response.id] = response

    def deferred_done_at(self, now: float) -> float:
        """Return when all deferred responses are scored, beginning now: one class of rewards after
        the other."""
        by_kind: list[list[float]] = [[] for _ in self._times.classes]
        for response in self._deferred.values():
            prompt = response.group.prompt.id
            by_kind[self._times.kind(prompt)].append(self._times.seconds(prompt, response.seed))
        self._deferred.clear()
        for chosen, tasks in zip(self._times.classes, by_kind, strict=True):
            free_at = [now] * chosen.workers
            now = max((_next(free_at, now, seconds) for seconds in tasks), default=now)
        return now


def _next(free_at: list[float], now: float, seconds: float) -> float:
    """Give the task to the worker that is free first; return when it is done."""
    if not free_at:
        return now + seconds
    done = max(now, free_at[0]) + seconds
    heapq.heapreplace(free_at, done)
    return done
