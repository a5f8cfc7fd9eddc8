"""Spot nodes that die in the middle of every step, as RLBoost's comparison of migration has it.

Owns when they die, and that as many are there again when the step's rollout is over. Who goes on
with their responses, and from where, is the core's business.
"""

from lightrl.core.commands import CloseRound, Command
from lightrl.core.events import Event, MessageArrived
from lightrl.core.state import Round, RoundState
from lightrl.messages.responses import TokenChunk
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.world import World


class Losses:
    def __init__(self, world: World, count: int, at_s: float, first_step: int) -> None:
        self._world = world
        self._handle, world.handle = world.handle, self._watch
        self._count = count
        self._at_s = at_s
        self._step = first_step - 1  # the last one in which some die
        self._dead: list[SimMachine] = []

    def _watch(self, event: Event, now: float) -> list[Command]:
        commands = self._handle(event, now)
        round = self._world.core.table.round
        is_chunk = isinstance(event, MessageArrived) and isinstance(event.message, TokenChunk)
        if is_chunk and round is not None and round.step > self._step:
            self._step = round.step
            self._world.at(round.opened_at + self._at_s, lambda: self._strike(round))
        if any(isinstance(command, CloseRound) for command in commands):
            for machine in self._dead:
                self._world.fleet.boot(machine)
            self._dead.clear()
        return commands

    def _strike(self, round: Round) -> None:
        if round.state is RoundState.RUNNING:
            spot = [m for m in self._world.machines.values() if m.is_spot and m.present]
            self._dead = spot[: self._count]
            for machine in self._dead:
                self._world.fleet.kill(machine)
