"""Rollout nodes whose GPUs also train: when they change over, and with how much parallelism they sample.

Owns three things that a colocated system does between and inside rounds, for comparison with published ones:
training on all nodes after the rollout; the stream trainer, which releases half of them while responses
still run (RollPacker, arXiv 2509.21009, algorithm 1); the parallelism planner (its section 4.2). All is
realised by nodes that leave and come back, so that the core itself moves the responses.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightrl.core.state import RoundState
from lightrl.sim.engine import Delta
from lightrl.sim.machines import Machine

if TYPE_CHECKING:
    from lightrl.sim.world import World

FIRST_LOOK, LAST_LOOK, LOOK_EVERY = 0.2, 0.5, 0.05  # completed responses
KV_SHARE = 0.95  # of the cache that may be planned with
MORE_PREEMPTIONS = 1.05  # than in the last round of the kind: more parallelism
QUIET_STEPS = 4  # without any: less


class Sharing:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.colocated = world.scenario.training.placement == "colocated"
        self.parallelism = min(world.engines)
        self._released: list[Machine] = []
        self._step = -1
        self._completed = 0
        self._next_look = FIRST_LOOK
        self._lengths: dict[str, list[int]] = {}  # of the last round of a kind
        self._seen: list[int] = []  # of this round
        self._preemptions: dict[str, int] = {}  # in the last round of a kind
        self._quiet = 0

    def look(self, deltas: Sequence[Delta]) -> None:
        """After tokens came: whether half of the nodes can go and train."""
        world = self._world
        finished = [d.offset + d.count for d in deltas if d.finished not in {None, "abort"}]
        round = world.core.ledger.round
        if not finished or round is None:
            return
        if round.step != self._step:
            self._step, self._completed, self._next_look, self._seen = round.step, 0, FIRST_LOOK, []
        self._completed += len(finished)
        self._seen += finished
        if not (self.colocated and world.switches.stream_trainer) or self._released:
            return
        if round.state is not RoundState.RUNNING:
            return
        done = self._completed / max(1, round.needed * round.group_size)
        if self._next_look <= done:
            while self._next_look <= done:
                self._next_look += LOOK_EVERY
            if done <= LAST_LOOK and self._others_can_hold_the_rest(round.kind):
                self._release_half()

    def close_round(self) -> None:
        """The rollout is over: released nodes are back, and all of them train."""
        world = self._world
        round = world.core.ledger.round
        if round is not None:
            self._lengths[round.kind] = self._seen or self._lengths.get(round.kind, [])
        if not world.settings.max_staleness:
            self._label("wait" if world.switches.async_rewards else "reward")
            world.at(world.now, self._change_over)

    def step_trained(self) -> None:
        if self.colocated:
            self._world.trainer.set_rate(self._world.now, 0.0)

    def _change_over(self) -> None:
        world = self._world
        for machine in self._released:
            self._take_back(machine, machine.serves)
        self._released = []
        if world.switches.planner:
            self._plan()
        world.at(world.trainer.jobs[0].ready_at if world.trainer.jobs else world.now, self._train)

    def _train(self) -> None:
        world = self._world
        self._label("train" if self.colocated else "wait")
        if self.colocated:
            world.trainer.set_rate(world.now, 1.0)
            world.plan_training()

    def _label(self, idle: str) -> None:
        for machine in self._world.machines.values():
            if machine.present:
                machine.engine.account(self._world.now)
            machine.engine.idle_label = idle

    # Stream trainer

    def _others_can_hold_the_rest(self, kind: str) -> bool:
        """Whether half of the nodes have the slots, and the cache, for what still runs."""
        present = [m for m in self._world.machines.values() if m.present]
        half = len(present) // 2
        if half == 0:
            return False
        rest = [n for m in present for n in m.engine.tokens_of_all()]
        rest += [len(entry[-1].tokens) for entry in self._world.core.ledger.queue]
        slots = sum(sorted(m.engine.slots for m in present)[:half])
        capacity = present[0].engine.profile.kv_tokens
        if len(rest) > slots:
            return False
        if not capacity:
            return True
        seen = sorted(self._lengths.get(kind, ()) or self._seen)
        peak = sum(self._world.scenario.workload.prompt_tokens + _expected(seen, n) for n in rest)
        return peak <= KV_SHARE * capacity * half

    def _release_half(self) -> None:
        world = self._world
        present = [m for m in world.machines.values() if m.present]
        present.sort(key=lambda m: (len(m.engine.running), m.spec.name))
        self._released = present[: len(present) // 2]
        for machine in self._released:
            for event in world.leave(machine, "released to train", released=True):
                world.feed(event)
        world.trainer.set_rate(world.now, len(self._released) / len(present))
        world.plan_training()

    def _take_back(self, machine: Machine, version: int) -> None:
        """It joins again with the weights that it had."""
        self._world.join(machine)
        if version >= 0 and machine.loading == version:
            self._world.confirm(machine, version)
            machine.engine.idle_label = "wait"

    # Planner

    def _plan(self) -> None:
        world, record = self._world, self._world.observer.newest
        before = self._preemptions.get(record.kind, 0)
        self._preemptions[record.kind] = record.preemptions
        self._quiet = 0 if record.preemptions else self._quiet + 1
        wanted = self.parallelism
        if record.preemptions > MORE_PREEMPTIONS * before:
            wanted *= 2
        elif self._quiet >= QUIET_STEPS:
            wanted //= 2
            self._quiet = 0
        if wanted in world.engines and wanted != self.parallelism:
            self._change_parallelism(wanted)

    def _change_parallelism(self, wanted: int) -> None:
        """Machines work together by `wanted` from now on; the weights are there already."""
        world = self._world
        machines = [m for m in world.machines.values() if m.present or m.merged]
        versions = {m.spec.name: m.serves for m in machines}
        version = max(versions.values())
        for machine in machines:
            for event in world.leave(machine, "another parallelism"):
                world.feed(event)
        self.parallelism = wanted
        width = wanted // min(world.engines)
        for k, machine in enumerate(machines):
            machine.merged = k % width > 0
            if not machine.merged:
                profile = world.engines[wanted].slower(machine.spec.slowness)
                parts = min(width, len(machines) - k)
                machine.refit(world.now, profile, parts * machine.spec.slots, parts)
                self._take_back(machine, version)


def _expected(seen: Sequence[int], held: int) -> float:
    """Mean of the lengths above what is held."""
    first = bisect_right(seen, held)
    return sum(seen[first:]) / (len(seen) - first) if first < len(seen) else 2.0 * held
