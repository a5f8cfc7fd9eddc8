"""Machines of a simulated fleet come and go: by a trace, as the nodes of a run did, or as the core
tells them.

Owns what a machine that comes says, what is lost with one that goes, and when that is noticed.
Decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightrl.core.events import Event, NodeDraining, NodeLeft, NodeLost, TokensArrived
from lightrl.messages.load import Load
from lightrl.messages.nodes import Hello
from lightrl.sim.colocation import Colocation
from lightrl.sim.machines import NodeChange, NodeChanges, NodeSpec, SimMachine
from lightrl.sim.mechanism import Simulation
from lightrl.sim.messages import IDLE, TRAINER, arrival, hello
from lightrl.sim.traces import TraceEvent
from lightrl.sim.transfers import Transfers


@dataclass(eq=False)
class Membership:
    _world: Simulation
    _transfers: Transfers
    _colocation: Colocation
    _changes: NodeChanges

    def set_out(self, nodes: Sequence[NodeSpec], trace: Sequence[TraceEvent]) -> None:
        """The trainer and these nodes are there at once, others come by the trace."""
        world = self._world
        world.at(0.0, lambda: self._arrive(hello(TRAINER, 1, "trainer", TRAINER)))
        world.at(0.0, lambda: self._transfers.publish(0))
        for spec in nodes:
            world.at(0.0, lambda name=spec.name: self.join(world.machines[name]))
        for event in trace:
            machine = world.machines[event.node]
            world.at(event.at_s, lambda m=machine, e=event: (self.boot if e.added else self.die)(m))
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """What nodes of the run did in it, they do again."""
        world = self._world
        for change in self._changes.get(step, ()):
            world.at(world.now + change.at_s, lambda c=change: self._repeat(c))

    def _repeat(self, change: NodeChange) -> None:
        machine = self._world.machines[change.spec.name]
        match change.what:
            case "ready":
                machine.comes_ready = True
                self.join(machine)
            case "lost":
                self.die(machine)
            case "left":
                for event in self.leave(machine, "left"):
                    self._world.feed(event)

    def join(self, machine: SimMachine) -> None:
        if machine.present:
            return
        machine.come(self._world.now)
        self._world.observer.fleet_changes(machine, 1)
        said = self._colocation.hello(machine)
        self._arrive(said, self._transfers.num_workers(machine), machine.load())

    def _arrive(self, said: Hello, num_workers: int = 0, load: Load = IDLE) -> None:
        for event in arrival(said, num_workers, load):
            self._world.feed(event)

    def boot(self, machine: SimMachine) -> None:
        """A machine of the trace is there; its engine starts."""
        world = self._world
        machine.boots += 1
        boots, machine.booted_at = machine.boots, world.now
        start_s = world.scenario.transfer.start_s
        world.at(
            world.now + start_s, lambda: self.join(machine) if machine.boots == boots else None
        )

    def die(self, machine: SimMachine) -> None:
        """Without warning: what it had not sent is lost, and it is missed only after a while."""
        world = self._world
        machine.boots += 1
        if not machine.present:
            return
        world.observer.fleet_changes(machine, -1)
        machine.go(world.now)
        self._transfers.lose(machine)
        lost_after_s = world.scenario.transfer.lost_after_s
        incarnation = machine.incarnation

        def missed() -> None:
            if machine.incarnation == incarnation:
                world.feed(NodeLost(machine.spec.name, "connection lost"))

        world.at(world.now + lost_after_s, missed)

    def leave(self, machine: SimMachine, reason: str) -> list[Event]:
        """What a node says that leaves in peace: its last tokens, then good-bye."""
        name, now = machine.spec.name, self._world.now
        if not machine.present:
            return []
        self._world.observer.fleet_changes(machine, -1)
        deltas = machine.engine.give_up(now)
        last = [TokensArrived(name, machine.chunk(deltas))] if deltas else []
        machine.go(now)
        self._transfers.lose(machine)
        return [NodeDraining(name, reason), *last, NodeLeft(name, reason, ok=True)]
