"""Rollout nodes whose GPUs also train: how a change of sides is carried out, and with how much
parallelism they sample.

When shared nodes are released, and come back, is decided in the core (`core/sides.py`); here they
leave and join again, so that the core itself moves the responses, and the trainer gets their share
of the devices. Also what compared systems do between rounds: training on all nodes after the
rollout, and the parallelism planner (RollPacker, arXiv 2509.21009, section 4.2). Spot nodes never
train.
"""

from collections.abc import Sequence

from lightrl.core.foreseen import Foreseen
from lightrl.core.sides import Sides
from lightrl.core.state import Node, Round, RoundState
from lightrl.core.window import Window
from lightrl.sim.engine import SimDelta
from lightrl.sim.machines import SPOT, SimMachine
from lightrl.sim.mechanism import Mechanism, Simulation

MORE_PREEMPTIONS = 1.05  # than in the last round of the kind: more parallelism
QUIET_STEPS = 4  # without any: less
RULES = {"foreseen": Foreseen, "window": Window}


class Colocation(Mechanism):
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.colocated = world.scenario.training.placement == "colocated"
        self.sides: Sides | None = None  # of nodes that change within a round
        if self.colocated and (rule := world.switches.offload) != "off":
            self.sides = Sides(world.core, RULES[rule](), self._shares, self._caches())
        self._worked_before = 0.0  # of the trainer, in earlier steps
        self._training: set[str] = set()  # released, and the switch is over
        self._preemptions: dict[str, int] = {}  # in the last round of a kind
        self._quiet = 0

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        if any(d.finished not in {None, "abort"} for d in deltas):
            self._look()

    def fleet_changed(self) -> None:
        # A node may be on its way: when all that follows from it has happened.
        self._world.at(self._world.now, self._look)

    def round_closed(self, round: Round) -> None:
        """The rollout is over: released nodes are back, and all of them train."""
        world = self._world
        if self.sides is not None:
            self.sides.rollout_ended(round, world.now)
        if not world.settings.max_staleness:
            self._label("wait" if world.switches.async_rewards else "reward")
            world.at(world.now, self._change_over)

    def step_trained(self) -> None:
        world = self._world
        if self.colocated:
            world.trainer.set_rate(world.now, 0.0)
        if self.sides is not None:
            self.sides.step_trained(world.now, world.trainer.worked_s - self._worked_before)
            self._worked_before = world.trainer.worked_s

    def _change_over(self) -> None:
        world = self._world
        self._training.clear()
        for machine in world.machines.values():
            if machine.released:
                self._take_back(machine, machine.serves)
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

    # Changes within a round

    def _shares(self, node: Node) -> bool:
        return self._world.machines[node.name].spec.kind != SPOT

    def _caches(self) -> dict[str, int]:
        return {m.spec.name: m.engine.profile.kv_tokens for m in self._world.machines.values()}

    def _look(self) -> None:
        world = self._world
        if self.sides is None:
            return
        world.trainer.advance(world.now)
        change = self.sides.look(world.now, world.trainer.worked_s - self._worked_before)
        if change.look_at is not None:
            world.at(change.look_at, self._look)
        if change.release:
            self._release([world.machines[name] for name in change.release])
        if change.take_back:
            self._return([world.machines[name] for name in change.take_back])

    def _release(self, machines: list[SimMachine]) -> None:
        world = self._world
        for machine in machines:
            for event in world.leave(machine, "released to train", released=True):
                world.feed(event)
        round = world.core.table.round

        def train() -> None:
            if self.sides is None or world.core.table.round is not round:
                return
            for machine in machines:
                if machine.released:
                    self._training.add(machine.spec.name)
                    self.sides.trains(machine.spec.name, world.now)
            self._set_share()
            self._look()

        world.at(world.now + world.scenario.training.switch_s, train)

    def _return(self, machines: list[SimMachine]) -> None:
        world = self._world
        self._training -= {m.spec.name for m in machines}
        self._set_share()
        round = world.core.table.round

        def sample() -> None:
            if world.core.table.round is not round:
                return  # its end has taken them back
            for machine in machines:
                if self.sides is not None and machine.released:
                    self.sides.samples(machine.spec.name, world.now)
                    self._take_back(machine, machine.serves)

        world.at(world.now + world.scenario.training.switch_s, sample)

    def _set_share(self) -> None:
        """The trainer has the devices that are on its side."""
        world = self._world
        if self._is_rolling_out():
            sharing = [m for m in world.machines.values() if m.spec.kind != SPOT]
            everyone = sum(m.present or m.released for m in sharing)
            world.trainer.set_rate(world.now, len(self._training) / everyone)
            world.plan_training()

    def _is_rolling_out(self) -> bool:
        round = self._world.core.table.round
        return round is not None and round.state is RoundState.RUNNING

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
