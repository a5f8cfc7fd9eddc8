"""Spot nodes that die in the middle of every step, as RLBoost's comparison of migration has it.

Owns when they die, and that as many are there again when the step's rollout is over. Who goes on
with their responses, and from where, is the core's business.
"""

from collections.abc import Sequence

from lightrl.core.state import Round, RoundState
from lightrl.sim.fleet.engine import SimDelta
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.inputs.nodes import SPOT
from lightrl.sim.mechanism import Mechanism
from lightrl.sim.world import World


class Losses(Mechanism):
    def __init__(self, world: World, count: int, at_s: float, first_step: int) -> None:
        self._world = world
        self._count = count
        self._at_s = at_s
        self._step = first_step - 1  # the last one in which some die
        self._dead: list[SimMachine] = []

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        round = self._world.core.table.round
        if round is not None and round.step > self._step:
            self._step = round.step
            self._world.at(round.opened_at + self._at_s, lambda: self._strike(round))

    def round_closed(self, round: Round) -> None:
        for machine in self._dead:
            self._world.fleet.boot(machine)
        self._dead.clear()

    def _strike(self, round: Round) -> None:
        if round.state is RoundState.RUNNING:
            spot = [m for m in self._world.machines.values() if m.spec.kind == SPOT and m.present]
            self._dead = spot[: self._count]
            for machine in self._dead:
                self._world.fleet.kill(machine)
