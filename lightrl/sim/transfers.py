"""New weights on their way to the machines of a simulated fleet: pulled together, then loaded.

Owns which machines wait for which version and how many pull at a time. Decides nothing: the core
says who gets which version, a scenario's `Transfer` how long that takes.
"""

from collections.abc import Callable

from lightrl.core.events import TokensArrived
from lightrl.sim.machines import SimMachine
from lightrl.sim.mechanism import Simulation


class Transfers:
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._offered: list[SimMachine] = []  # a version, by the event at hand
        self._num_pulling = 0

    def offer(self, machine: SimMachine, version: int) -> None:
        if machine.loading == version:
            return  # it is told of more sources
        machine.loading = version
        self._offered.append(machine)

    def begin(self) -> None:
        """All that were told of a version in one breath pull it together."""
        if not self._offered:
            return
        world = self._world
        machines, self._offered = self._offered, []
        self._num_pulling += len(machines)
        seconds = world.scenario.transfer.pull_s(self._num_pulling)
        for machine in machines:
            version = machine.loading
            if not machine.engine.running:
                machine.engine.hold(world.now, "weights")
            world.at(world.now + seconds, self._loader(machine, version))

    def _loader(self, machine: SimMachine, version: int) -> Callable[[], None]:
        incarnation = machine.incarnation

        def pulled() -> None:
            self._num_pulling -= 1
            if machine.incarnation == incarnation:
                self._load(machine, version)

        return pulled

    def _load(self, machine: SimMachine, version: int) -> None:
        """The engine stops for it; what it was at resumes under the new version."""
        world = self._world
        if not machine.present or machine.loading != version:
            return
        deltas = machine.engine.give_up(world.now)
        chunk = machine.chunk(deltas) if deltas else None
        machine.engine.hold(world.now, "weights")
        incarnation = machine.incarnation

        def loaded() -> None:
            is_same = machine.present and machine.incarnation == incarnation
            if is_same and machine.loading == version:
                world.confirm(machine, version)

        world.at(world.now + world.scenario.transfer.load_s, loaded)
        if chunk is not None:
            world.feed(TokensArrived(machine.spec.name, chunk))
