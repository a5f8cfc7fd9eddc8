"""Rollout nodes whose GPUs also train: when they change over, and with how much parallelism they
sample.

Owns three things that a colocated system does between and inside rounds, for comparison with
published ones: training on all nodes after the rollout; the stream trainer, which releases half of
them while responses still run (RollPacker, arXiv 2509.21009, algorithm 1), with `scale_down` half
of the rest again while those left stay fast; the parallelism planner (its section 4.2). Spot nodes
never train; where they can take what still runs, all others go. All is realised by nodes that leave
and come back, so that the core itself moves the responses.
"""

from bisect import bisect_right
from collections.abc import Sequence

from lightrl.core.state import Round, RoundState
from lightrl.sim.engine import SimDelta
from lightrl.sim.machines import SPOT, SimMachine
from lightrl.sim.mechanism import Mechanism, Simulation

FIRST_LOOK, LAST_LOOK, LOOK_EVERY = 0.2, 0.5, 0.05  # responses finished, of those launched
LAST_LOOK_AGAIN = 0.95
# of those that stay may be used when more than the first half go: the tail is slow
SLOTS_AGAIN = 0.2
KV_SHARE = 0.95  # of the cache that may be planned with
MORE_PREEMPTIONS = 1.05  # than in the last round of the kind: more parallelism
QUIET_STEPS = 4  # without any: less


class Colocation(Mechanism):
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.colocated = world.scenario.training.placement == "colocated"
        self._released: list[SimMachine] = []
        self._step = -1
        self._next_look = FIRST_LOOK
        self._lengths: dict[str, list[int]] = {}  # of the last round of a kind
        self._seen: list[int] = []  # lengths of what has finished in this round
        self._preemptions: dict[str, int] = {}  # in the last round of a kind
        self._quiet = 0

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        """After tokens came: whether half of the nodes can go and train."""
        world = self._world
        finished = [d.offset + d.count for d in deltas if d.finished not in {None, "abort"}]
        round = world.core.table.round
        if not finished or round is None:
            return
        if round.step != self._step:
            self._step, self._next_look, self._seen = round.step, FIRST_LOOK, []
        self._seen += finished
        again = world.switches.scale_down
        if not (self.colocated and world.switches.stream_trainer) or (self._released and not again):
            return
        if round.state is not RoundState.RUNNING:
            return
        done = len(self._seen) / max(1, len(round.groups) * round.responses_launched)
        if self._next_look <= done:
            while self._next_look <= done:
                self._next_look += LOOK_EVERY
            last = LAST_LOOK_AGAIN if again else LAST_LOOK
            if done <= last and (machines := self._dispensable(round.kind)):
                self._release(machines)

    def round_closed(self, round: Round) -> None:
        """The rollout is over: released nodes are back, and all of them train."""
        world = self._world
        if world.core.table.round is not None:
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
            machine.engine.idle_label = "wait" if machine.spec.kind == SPOT else idle

    # Stream trainer

    def _dispensable(self, kind: str) -> list[SimMachine]:
        """Half of the nodes that can train; all, if spot nodes can take what still runs; or
        none."""
        present = [m for m in self._world.machines.values() if m.present]
        trainers = [m for m in present if m.spec.kind != SPOT]
        trainers.sort(key=lambda m: (len(m.engine.running), m.spec.name))
        counts = (
            [len(trainers) // 2]
            if len(trainers) == len(present)
            else [len(trainers), len(trainers) // 2]
        )
        for count in counts:
            names = {m.spec.name for m in trainers[:count]}
            if count and self._can_hold_the_rest(
                [m for m in present if m.spec.name not in names], present, kind
            ):
                return trainers[:count]
        return []

    def _can_hold_the_rest(
        self, staying: list[SimMachine], present: list[SimMachine], kind: str
    ) -> bool:
        """Whether they have the slots, and the cache, for what still runs."""
        rest = [n for m in present for n in m.engine.tokens_of_all()]
        rest += [len(r.tokens) for r in self._world.core.table.queue.waiting()]
        room = SLOTS_AGAIN if self._released else 1.0
        if not staying or len(rest) > room * sum(m.engine.slots for m in staying):
            return False
        capacity = staying[0].engine.profile.kv_tokens
        if not capacity:
            return True
        seen = sorted(self._lengths.get(kind, ()) or self._seen)
        peak = sum(self._world.scenario.workload.prompt_tokens + _expected(seen, n) for n in rest)
        return peak <= KV_SHARE * capacity * len(staying)

    def _release(self, machines: list[SimMachine]) -> None:
        world = self._world
        everyone = sum(
            (m.present or m.released) and m.spec.kind != SPOT for m in world.machines.values()
        )
        self._released = self._released + machines
        for machine in machines:
            for event in world.leave(machine, "released to train", released=True):
                world.feed(event)
        share, round = len(self._released) / everyone, world.core.table.round

        def trains() -> None:
            if self._released and world.core.table.round is round:
                world.trainer.set_rate(world.now, share)
                world.plan_training()

        world.at(world.now + world.scenario.training.switch_s, trains)

    def _take_back(self, machine: SimMachine, version: int) -> None:
        """It joins again with the weights that it had."""
        self._world.join(machine)
        if version >= 0 and machine.loading == version:
            self._world.confirm(machine, version)
            machine.engine.idle_label = "wait"

    # Planner

    def _plan(self) -> None:
        world, record = self._world, self._world.newest
        before = self._preemptions.get(record.kind, 0)
        self._preemptions[record.kind] = record.preemptions
        self._quiet = 0 if record.preemptions else self._quiet + 1
        wanted = world.parallelism
        if record.preemptions > MORE_PREEMPTIONS * before:
            wanted *= 2
        elif self._quiet >= QUIET_STEPS:
            wanted //= 2
            self._quiet = 0
        if wanted in world.engines and wanted != world.parallelism:
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
        world.parallelism = wanted
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
