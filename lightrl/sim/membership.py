"""Simulated machines join and leave: by a trace, as the nodes of a recorded run did, or because the
core drains them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightrl.core.events import (
    Event,
    MessageArrived,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeLost,
)
from lightrl.messages.nodes import PROTOCOL, Heartbeat, Hello
from lightrl.messages.weights import WeightsEndpoint
from lightrl.sim.colocation import DEVICE, SimColocation
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.inputs.nodes import NodeChanges, NodeSpec
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.simulation import Simulation
from lightrl.sim.trainer import TRAINER
from lightrl.sim.weights.transfers import Transfers


@dataclass(eq=False)
class SimMembership:
    _world: Simulation
    _transfers: Transfers
    _colocation: SimColocation
    _changes: NodeChanges

    def start(self, nodes: Sequence[NodeSpec], trace: Sequence[TraceEvent]) -> None:
        """Schedule when the trainer and these nodes join, and the events of the trace."""
        world = self._world
        parked = Hello(TRAINER, 1, ("trainer",), PROTOCOL, pid=1, host=TRAINER, is_released=True)
        world.at(0.0, lambda: self._announce(parked, Heartbeat(device=DEVICE)))
        world.at(0.0, lambda: self._transfers.publish(0))
        for spec in () if self._changes else nodes:
            world.at(0.0, lambda name=spec.name: self.join(world.machines[name]))
        for event in trace:
            machine = world.machines[event.node]
            act = self.boot if event.added else self.kill
            world.at(event.at_s, lambda act=act, machine=machine: act(machine))
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Schedule what the nodes of the recorded run did in this step."""
        world = self._world
        for at_s, node, what in self._changes.get(step, ()):
            if (machine := world.machines.get(node)) is not None:
                act = partial(self._repeat, machine, what)
                world.at(world.now + max(0.0, at_s), act)

    def _repeat(self, machine: SimMachine, what: str) -> None:
        match what:
            case "ready":
                machine.joins_ready = True
                self.join(machine)
            case "lost":
                self.kill(machine)
            case _:
                for event in self.leave(machine, "left"):
                    self._world.feed(event)

    def join(self, machine: SimMachine) -> None:
        if machine.present:
            return
        machine.join(self._world.now)
        heartbeat = self._colocation.heartbeat(machine)
        num_workers = self._transfers.num_workers(machine)
        self._announce(self._colocation.hello(machine), replace(heartbeat, num_workers=num_workers))

    def _announce(self, hello: Hello, heartbeat: Heartbeat) -> None:
        self._world.feed(NodeJoined(hello))
        for message in (WeightsEndpoint((f"{hello.node}:1",), secret=hello.node), heartbeat):
            self._world.feed(MessageArrived(hello.node, message))

    def boot(self, machine: SimMachine) -> None:
        """Start the engine of a machine of the trace, which joins then if it is not lost before."""
        world, now = self._world, self._world.now
        machine.booted_at = now

        def join() -> None:
            if machine.booted_at == now:
                self.join(machine)

        world.at(now + world.scenario.transfer.start_s, join)

    def kill(self, machine: SimMachine) -> None:
        """Lose a machine without warning: its unsent tokens are lost, and the core detects the loss
        later."""
        world = self._world
        machine.booted_at = math.inf
        if not machine.present:
            return
        self._remove(machine)
        changes = machine.changes

        def detect() -> None:
            if machine.changes == changes:
                world.feed(NodeLost(machine.spec.name, "connection lost"))

        world.at(world.now + world.scenario.transfer.lost_after_s, detect)

    def leave(self, machine: SimMachine, reason: str) -> list[Event]:
        """Drain a machine; return its last tokens and its goodbye."""
        name = machine.spec.name
        if not machine.present:
            return []
        deltas = machine.engine.abort_all(self._world.now)
        last = [MessageArrived(name, machine.chunk(deltas))] if deltas else []
        self._remove(machine)
        return [NodeDraining(name, reason), *last, NodeLeft(name, reason, ok=True)]

    def _remove(self, machine: SimMachine) -> None:
        machine.leave(self._world.now)
        self._transfers.lose(machine)
