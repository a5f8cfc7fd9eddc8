"""What simulated responses will be: their lengths, their rewards, and when these are known."""

import heapq
from collections.abc import Iterable, Sequence

from lightrl.core.race import DECIDED
from lightrl.core.settings import EvalSet
from lightrl.core.state import DrawnPrompt, Response, Round
from lightrl.sim.fleet.engine import SimDelta
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.inputs.workload import RewardTimes, Workload, uniforms
from lightrl.sim.mechanism import Mechanism, Simulation

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
    """When the reward of a response is known."""

    def __init__(self, times: RewardTimes) -> None:
        self._times = times
        # one heap for each class of rewards: when its workers are free; empty = unlimited
        self._free_at = [[0.0] * round(c.workers * c.beside) for c in times.classes]

    def done_at(self, now: float, prompt: str, noise: int) -> float:
        """Return when the next free worker has scored it, while nodes still sample."""
        kind = self._times.kind(prompt)
        seconds = self._times.seconds(prompt, noise) * self._times.classes[kind].beside
        return _next(self._free_at[kind], now, seconds) + self._times.told_s

    def all_done_at(self, now: float, responses: Iterable[Response]) -> float:
        """Return when all are scored, beginning now: one class of rewards after the other."""
        by_kind: list[list[float]] = [[] for _ in self._times.classes]
        for response in responses:
            prompt = response.group.prompt.id
            by_kind[self._times.kind(prompt)].append(self._times.seconds(prompt, response.seed))
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


class DeferredRewards(Mechanism):
    """Rewards that are computed after the rollout, for comparison. The core gets each score
    immediately; the time that all of them take is added to the step.

    A system without scores does not know which groups are complete, so it may let the surplus of a
    group run on (`Switches.surplus_ends`).
    """

    def __init__(self, world: Simulation, workers: RewardWorkers) -> None:
        self._world = world
        self._workers = workers
        # finished and not scored
        self._unscored: dict[str, Response] = {}
        # aborted by the core, but still running
        self._surplus: dict[tuple[str, int], tuple[SimMachine, Response]] = {}

    def defer(self, response: Response) -> None:
        self._unscored[response.id] = response

    def keeps(self, machine: SimMachine, name: str, number: int) -> bool:
        """Return whether an attempt that the core aborts continues until its round closes."""
        table = self._world.core.table
        round, response = table.round, table.responses.get(name)
        if self._world.switches.surplus_ends or round is None or response is None:
            return False
        if round.cut == DECIDED:
            return False
        self._surplus[name, number] = machine, response
        return True

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        for d in deltas if self._surplus else ():
            if d.finished is not None and (
                kept := self._surplus.pop((d.response, d.attempt), None)
            ):
                self.defer(kept[1])

    def round_closed(self, round: Round) -> None:
        for (name, number), (machine, _) in self._surplus.items():
            self._world.abort(machine, name, number)
        self._surplus.clear()

    def scored_at(self) -> float:
        """Return when all finished responses are scored, beginning now."""
        done, self._unscored = self._unscored, {}
        return self._workers.all_done_at(self._world.now, done.values())
