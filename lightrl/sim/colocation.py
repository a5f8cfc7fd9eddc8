"""Rollout nodes whose GPUs also train: what they and the trainer do when they are told to change
sides, and with how much parallelism they sample.

With a rule of the core (`Switches.offload`) the core gives the orders, and here they take their
time: a node sleeps, keeps pulling weights, and wakes; the trainer has the share of the devices
whose engines sleep, and parks before it publishes. What a change costs at the end of a round is in
the step times of the scenarios. Also what compared systems do between rounds: training on all nodes
after the rollout, and the parallelism planner (RollPacker, arXiv 2509.21009, section 4.2). Spot
nodes never train.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightrl.core.events import Event, NodeReleased, TokensArrived, TrainerParked
from lightrl.core.settings import Settings
from lightrl.core.state import Round, RoundState
from lightrl.errors import SimError
from lightrl.messages import Message
from lightrl.sharing_messages import Park, Parked, Release, Released, Wake
from lightrl.sim.machines import SPOT, NodeSpec, SimMachine
from lightrl.sim.mechanism import FOREVER_S, Mechanism, Simulation
from lightrl.sim.messages import TRAINER
from lightrl.sim.scenario import Scenario, Switches

MORE_PREEMPTIONS = 1.05  # than in the last round of the kind: more parallelism
QUIET_STEPS = 4  # without any: less


def settings_in(
    scenario: Scenario, settings: Settings, switches: Switches, nodes: Sequence[NodeSpec]
) -> Settings:
    """What the core must know of a simulated run. Each node's devices can change sides by
    themselves, unless all that is trained must be summed in one order. Raises SimError."""
    workload = scenario.workload
    if workload.num_prompts < settings.prompts_launched:
        raise SimError(
            f"workload {workload.name} has {workload.num_prompts} prompts, fewer than the "
            f"{settings.prompts_launched} of one round"
        )
    num_parts = 1 if settings.deterministic else max(1, sum(n.kind != SPOT for n in nodes))
    return replace(
        settings,
        num_prompts=workload.num_prompts,
        lease_s=FOREVER_S,
        vocabulary=1,
        offload=switches.offload,
        device_parts=num_parts,
    )


class Colocation(Mechanism):
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.colocated = world.scenario.training.placement == "colocated"
        self._has_rule = world.shares
        self._is_at_work = False  # the trainer, on the devices that sleep
        self._preemptions: dict[str, int] = {}  # in the last round of a kind
        self._quiet = 0

    def round_closed(self, round: Round) -> None:
        """The rollout is over: all nodes train."""
        world = self._world
        if not world.settings.max_staleness:
            self._label("wait" if world.switches.async_rewards else "reward")
            world.at(world.now, self._change_over)

    def step_trained(self) -> None:
        if self.colocated:
            self._is_at_work = False
            self._world.trainer.set_rate(self._world.now, 0.0)

    def _change_over(self) -> None:
        world = self._world
        if world.switches.planner:
            self._plan()
        world.at(world.trainer.jobs[0].ready_at if world.trainer.jobs else world.now, self._train)

    def _train(self) -> None:
        self._label("train" if self.colocated else "wait")
        if self.colocated and not self._has_rule:
            self._world.trainer.set_rate(self._world.now, 1.0)
            self._world.plan_training()

    def _label(self, idle: str) -> None:
        for machine in self._world.machines.values():
            if machine.present:
                machine.engine.account(self._world.now)
            machine.engine.idle_label = "wait" if machine.spec.kind == SPOT else idle

    # Orders of the core

    def obey(self, machine: SimMachine, order: Message) -> list[Event]:
        """What a node says to it at once; the rest when it has changed sides."""
        world, name = self._world, machine.spec.name
        machine.order += 1
        number, switch_s = machine.order, self._switch_s()
        events: list[Event] = []
        if isinstance(order, Release):
            deltas = machine.engine.give_up(world.now)
            if deltas:
                events.append(TokensArrived(name, machine.chunk(deltas)))
            machine.engine.hold(world.now, "train")
            said = NodeReleased(name, Released(order.number, 0, switch_s))

            def sleep() -> None:
                if machine.order == number and machine.present:
                    if not machine.asleep:
                        machine.asleep = True
                        world.feed(said)
                    self.share()

            if not switch_s:
                machine.asleep = True
                events.append(said)
            world.at(world.now + switch_s, sleep)
        elif isinstance(order, Wake):

            def wake() -> None:
                if machine.order == number and machine.present:
                    machine.asleep = False
                    if machine.loading < 0:
                        world.confirm(machine, machine.holds)

            world.at(world.now + switch_s, wake)
        return events

    def trains(self) -> None:
        """The trainer has work from now on, and devices."""
        self._is_at_work = True
        self.share()

    @property
    def park_s(self) -> float:
        return self._world.scenario.training.park_s if self.colocated else 0.0

    def park(self, order: Park) -> None:
        """In the middle of a step: it goes on when there are shards again, or devices."""
        world = self._world
        self._is_at_work = False
        self.share()
        said = TrainerParked(TRAINER, Parked(order.number, 0, self.park_s))
        world.at(world.now + self.park_s, lambda: world.feed(said))

    def share(self) -> None:
        """The trainer has the devices that are on its side, if it has taken them."""
        world = self._world
        if self._has_rule:
            sharing = [m for m in world.machines.values() if m.spec.kind != SPOT and m.present]
            asleep = sum(m.asleep for m in sharing) if self._is_at_work else 0
            world.trainer.set_rate(world.now, asleep / len(sharing) if sharing else 0.0)
            world.plan_training()

    def _switch_s(self) -> float:
        round = self._world.core.table.round
        is_within = round is not None and round.state is RoundState.RUNNING
        return self._world.scenario.training.switch_s if is_within else 0.0

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
                self._begin_again(machine, version)

    def _begin_again(self, machine: SimMachine, version: int) -> None:
        """It joins again with the weights that it had."""
        world = self._world
        world.join(machine)
        if version >= 0 and machine.loading == version:
            world.confirm(machine, version)
            machine.engine.idle_label = "wait"
