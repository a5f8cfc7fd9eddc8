"""Rollout nodes whose GPUs also train: what they and the trainer do when they are told to change
sides; and engines of several sizes over the same devices, which take turns as they are told.

With a rule of the core (`Switches.offload`) the core gives the orders, and here they take their
time: a node sleeps, keeps pulling weights, and wakes; the trainer has the share of the devices
whose engines sleep, and parks before it publishes. What a change of sides costs at the end of a
round is in the step times of the scenarios; one of sizes takes the time of a switch there, too.
Also what compared systems do between rounds: training on all nodes after the rollout. Spot nodes
never train.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightrl.core.events import Event, NodeHeard, NodeReleased, TokensArrived, TrainerParked
from lightrl.core.settings import Settings
from lightrl.core.state import Round, RoundState
from lightrl.errors import SimError
from lightrl.messages.message import Message
from lightrl.messages.nodes import Heartbeat, Hello
from lightrl.messages.sharing import (
    AssignDevices,
    EngineAsleep,
    SleepEngine,
    SuspendTrainer,
    TrainerSuspended,
    WakeEngine,
)
from lightrl.sim.machines import SPOT, NodeSpec, SimMachine
from lightrl.sim.mechanism import FOREVER_S, Mechanism, Simulation
from lightrl.sim.messages import DEVICE, TRAINER
from lightrl.sim.scenario import Scenario, Switches


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
    parallel = sizes_in(scenario, settings, switches)
    if parallel and switches.offload != "off":
        raise SimError(
            f"--offload {switches.offload}: engines of several sizes take turns with each other, "
            "not with the trainer"
        )
    num_parts = 1 if settings.deterministic else max(1, sum(n.kind != SPOT for n in nodes))
    return replace(
        settings,
        num_prompts=workload.num_prompts,
        lease_s=FOREVER_S,
        vocabulary=1,
        offload=switches.offload,
        device_parts=num_parts,
        parallel=parallel,
    )


def sizes_in(scenario: Scenario, settings: Settings, switches: Switches) -> tuple[int, ...]:
    """Devices of an engine, of each size that takes turns; none if there is one size. Raises
    SimError."""
    parallel = settings.parallel
    if switches.planner and not parallel and len(scenario.engines) > 1:
        parallel = tuple(sorted(scenario.engines))
    for size in parallel:
        if size not in scenario.engines:
            known = ", ".join(map(str, sorted(scenario.engines)))
            raise SimError(
                f"rollout.parallel: of an engine of {size} devices workload "
                f"{scenario.workload.name} says nothing; of these it does: {known}"
            )
    return parallel


class Colocation(Mechanism):
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.colocated = world.scenario.training.placement == "colocated"
        self._has_rule = world.shares
        self._is_at_work = False  # the trainer, on the devices that sleep
        self._num_given = 0  # parts of these, where each changes sides by itself

    def round_closed(self, round: Round) -> None:
        """The rollout is over: all nodes train."""
        world = self._world
        if not world.settings.max_staleness:
            self._label("wait" if world.switches.async_rewards else "reward")
            world.at(world.now, self._change_over)

    def step_trained(self) -> None:
        if self.colocated:
            self._is_at_work, self._num_given = False, 0
            self._world.trainer.set_rate(self._world.now, 0.0)

    def _change_over(self) -> None:
        world = self._world
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
        number, switch_s = machine.order, self._switch_s(machine)
        events: list[Event] = []
        if isinstance(order, SleepEngine):
            deltas = machine.engine.give_up(world.now)
            if deltas:
                events.append(TokensArrived(name, machine.chunk(deltas)))
            machine.engine.hold(world.now, "train")
            said = NodeReleased(name, EngineAsleep(order.number, 0, switch_s))

            def sleep() -> None:
                if machine.order == number and machine.present:
                    if not machine.asleep:
                        self._sleeps(machine)
                    if switch_s:  # also of one that had not woken yet
                        world.feed(said)
                    self.share()

            if not switch_s:
                self._sleeps(machine)
                events.append(said)
            world.at(world.now + switch_s, sleep)
        elif isinstance(order, WakeEngine):

            def wake() -> None:
                if machine.order == number and machine.present:
                    self._wakes(machine)
                    if machine.loading < 0:
                        world.confirm(machine, machine.holds)

            world.at(world.now + switch_s, wake)
        return events

    def trains(self) -> None:
        """The trainer has work from now on, and devices."""
        self._is_at_work = True
        self.share()

    def hello(self, machine: SimMachine) -> Hello:
        """Each node that shares uses a part of the trainer's devices."""
        said = machine.hello(self.colocated, self._world.shares)
        if not said.shares or self._world.settings.device_parts == 1:
            return said
        names = [m.spec.name for m in self._world.machines.values() if m.spec.kind != SPOT]
        return replace(said, part=names.index(machine.spec.name))

    def tell_trainer(self, order: AssignDevices | SuspendTrainer) -> None:
        """It has work from now on, and these devices; or none."""
        if isinstance(order, SuspendTrainer):
            self.park(order)
        else:
            self._num_given = len(order.parts)
            self.trains()

    @property
    def park_s(self) -> float:
        return self._world.scenario.training.park_s if self.colocated else 0.0

    def park(self, order: SuspendTrainer) -> None:
        """In the middle of a step: it goes on when there are shards again, or devices."""
        world = self._world
        self._is_at_work, self._num_given = False, 0
        self.share()
        said = TrainerParked(TRAINER, TrainerSuspended(order.number, 0, self.park_s))
        world.at(world.now + self.park_s, lambda: world.feed(said))

    def share(self) -> None:
        """The trainer has the devices that are on its side, if it has taken them."""
        world = self._world
        num_parts = world.settings.device_parts
        if self._has_rule and num_parts > 1:
            world.trainer.set_rate(world.now, self._num_given / num_parts)
            world.plan_training()
        elif self._has_rule:
            sharing = [m for m in world.machines.values() if m.spec.kind != SPOT and m.present]
            asleep = sum(m.asleep for m in sharing) if self._is_at_work else 0
            world.trainer.set_rate(world.now, asleep / len(sharing) if sharing else 0.0)
            world.plan_training()

    def loads(self) -> list[Event]:
        """What engines that take turns say of themselves."""
        return [
            NodeHeard(
                name,
                Heartbeat(m.load(), device=DEVICE),
            )
            for name, m in self._world.machines.items()
            if m.spec.parallel and m.present
        ]

    def _sleeps(self, machine: SimMachine) -> None:
        machine.asleep = True
        if machine.spec.parallel:
            self._world.turn(machine, asleep=True)

    def _wakes(self, machine: SimMachine) -> None:
        machine.asleep = False
        if machine.spec.parallel:
            self._world.turn(machine, asleep=False)

    def _switch_s(self, machine: SimMachine) -> float:
        if machine.spec.parallel:
            return self._world.scenario.training.switch_s
        round = self._world.core.table.round
        is_within = round is not None and round.state is RoundState.RUNNING
        return self._world.scenario.training.switch_s if is_within else 0.0
