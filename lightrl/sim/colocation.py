"""Rollout nodes whose GPUs also train, and engines of several sizes on the same devices.

With a rule of the core (`Switches.offload`) the core sends the orders, and here they take their
time: a node sleeps, keeps pulling weights, and wakes; the trainer has the share of the devices
whose engines sleep, and parks before it publishes. The step times of the scenarios include a change
of sides at the end of a round. Without a rule, as compared systems work, all nodes train after the
rollout. Spot nodes never train.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightrl.core.events import Event, MessageArrived
from lightrl.core.settings import Settings
from lightrl.core.state import RoundState
from lightrl.errors import SimError
from lightrl.messages.nodes import PROTOCOL, Heartbeat, Hello
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.inputs.nodes import SPOT, NodeSpec
from lightrl.sim.inputs.scenario import Scenario, Switches
from lightrl.sim.simulation import FOREVER_S, Simulation
from lightrl.sim.trainer import TRAINER, SimTrainer
from lightrl.sim.weights.transfers import Transfers

DEVICE = "cuda"


def settings_in(
    scenario: Scenario, settings: Settings, switches: Switches, nodes: Sequence[NodeSpec]
) -> Settings:
    """Return the core's settings for a simulation. The devices of each node can change sides by
    themselves, unless the sum over all that is trained must have one order. Raise SimError."""
    workload = scenario.workload
    if workload.num_prompts < settings.prompts_launched:
        raise SimError(
            f"workload {workload.name} has {workload.num_prompts} prompts, fewer than the "
            f"{settings.prompts_launched} of one round"
        )
    parallel = _sizes_in(scenario, settings, switches)
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


def _sizes_in(scenario: Scenario, settings: Settings, switches: Switches) -> tuple[int, ...]:
    """Return the sizes of engines that take turns; none if there is one size."""
    parallel = settings.parallel
    if switches.planner and not parallel and len(scenario.engines) > 1:
        parallel = tuple(sorted(scenario.engines))
    for size in parallel:
        if size not in scenario.engines:
            known = ", ".join(map(str, sorted(scenario.engines)))
            raise SimError(
                f"rollout.parallel: workload {scenario.workload.name} does not describe an engine "
                f"of {size} devices; it describes {known}"
            )
    return parallel


class SimColocation:
    def __init__(self, world: Simulation, trainer: SimTrainer, transfers: Transfers) -> None:
        self._world = world
        self._trainer = trainer
        self._transfers = transfers
        self._is_colocated = world.scenario.is_colocated
        # the core decides when devices change sides
        self._has_rule = self._is_colocated and world.switches.offload != "off"
        self._trains = False  # the trainer has work and devices
        self._num_given = 0  # parts of the devices, where each changes sides by itself

    def round_closed(self) -> None:
        """Train on all nodes when the rewards are known."""
        world, jobs = self._world, self._trainer.jobs
        if not world.settings.max_staleness:
            self._label("wait" if world.switches.async_rewards else "reward")
            # after what else happens now
            world.at(
                world.now, lambda: world.at(jobs[0].ready_at if jobs else world.now, self._train)
            )

    def step_trained(self) -> None:
        if self._is_colocated:
            self._trains, self._num_given = False, 0
            self._trainer.set_rate(0.0)

    def _train(self) -> None:
        self._label("train" if self._is_colocated else "wait")
        if self._is_colocated and not self._has_rule:
            self._trainer.set_rate(1.0)

    def _label(self, idle: str) -> None:
        for machine in self._world.machines.values():
            if machine.present:
                machine.engine.account(self._world.now)
            machine.engine.idle_label = "wait" if machine.is_spot else idle

    # Orders of the core

    def order(self, machine: SimMachine, order: SetDevices) -> list[Event]:
        """Carry out an order; return the events that follow immediately."""
        world = self._world
        machine.changes += 1
        changes, switch_s = machine.changes, self._switch_s(machine)
        if not order.active:
            return self._release(machine, order, switch_s)

        def wake() -> None:
            if machine.changes == changes:
                self._set_asleep(machine, False)
                if machine.loading < 0:
                    self._transfers.confirm(machine, machine.holds)

        world.at(world.now + switch_s, wake)
        return []

    def _release(self, machine: SimMachine, order: SetDevices, switch_s: float) -> list[Event]:
        world, name, changes = self._world, machine.spec.name, machine.changes
        events: list[Event] = []
        deltas = machine.engine.abort_all(world.now)
        if deltas:
            events.append(MessageArrived(name, machine.chunk(deltas)))
        machine.engine.hold(world.now, "train")
        released = MessageArrived(name, DevicesReleased("rollout", order.number, 0, switch_s))

        def sleep() -> None:
            if machine.changes == changes:
                if not machine.asleep:
                    self._set_asleep(machine, True)
                if switch_s:  # also for a machine that was still waking
                    world.feed(released)
                self._share()

        if not switch_s:
            self._set_asleep(machine, True)
            events.append(released)
        world.at(world.now + switch_s, sleep)
        return events

    def order_trainer(self, order: SetDevices) -> None:
        """Assign devices to the trainer, or take them away in the middle of a step."""
        world = self._world
        if order.active:
            self._num_given = len(order.parts)
            self.begin_training()
            return
        self._trains, self._num_given = False, 0
        self._share()
        parked = MessageArrived(TRAINER, DevicesReleased("trainer", order.number, 0, self.park_s))
        world.at(world.now + self.park_s, lambda: world.feed(parked))

    def begin_training(self) -> None:
        """The trainer has work from now on."""
        self._trains = True
        self._share()

    # Messages of nodes

    def hello(self, machine: SimMachine) -> Hello:
        """Return the Hello of a node; each that shares uses a part of the trainer's devices."""
        name, spec, part = machine.spec.name, machine.spec, 0
        is_with_trainer = self._is_colocated and not machine.is_spot
        shares = is_with_trainer and self._has_rule
        if shares and self._world.settings.device_parts > 1:
            machines = self._world.machines.values()
            part = [m.spec.name for m in machines if not m.is_spot].index(name)
        return Hello(
            name,
            machine.changes,
            ("rollout",),
            PROTOCOL,
            pid=1,
            host=TRAINER if is_with_trainer else name,
            slots=machine.engine.slots,
            is_preemptible=machine.is_spot,
            shares=TRAINER if shares else "",
            part=part,
            parallel=spec.parallel,
            is_released=machine.asleep,
        )

    def heartbeat(self, machine: SimMachine) -> Heartbeat:
        return Heartbeat(machine.load(), device=DEVICE)

    def heartbeats(self) -> list[Event]:
        """Return the loads of engines that take turns with other sizes."""
        return [
            MessageArrived(name, self.heartbeat(m))
            for name, m in self._world.machines.items()
            if m.spec.parallel and m.present
        ]

    @property
    def park_s(self) -> float:
        return self._world.scenario.training.park_s if self._is_colocated else 0.0

    def _share(self) -> None:
        """Train with the share of the devices that are on the trainer's side."""
        world, num_parts = self._world, self._world.settings.device_parts
        if not self._has_rule:
            return
        if num_parts > 1:
            self._trainer.set_rate(self._num_given / num_parts)
            return
        sharing = [m for m in world.machines.values() if m.present and not m.is_spot]
        asleep = sum(m.asleep for m in sharing) if self._trains else 0
        self._trainer.set_rate(asleep / len(sharing) if sharing else 0.0)

    def _set_asleep(self, machine: SimMachine, asleep: bool) -> None:
        machine.asleep = asleep
        if machine.spec.parallel:  # it sleeps for engines of another size
            machine.turn(self._world.now, asleep)

    def _switch_s(self, machine: SimMachine) -> float:
        round = self._world.core.table.round
        is_within = round is not None and round.state is RoundState.RUNNING
        return self._world.scenario.training.switch_s if machine.spec.parallel or is_within else 0.0
