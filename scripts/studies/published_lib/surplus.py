"""Surplus responses that run on, as in a system that has no scores before the rollout is over."""

from collections.abc import Sequence

from lightrl.core.rounds.race import DECIDED
from lightrl.core.state import Response, Round
from lightrl.sim.fleet.engine import SimDelta
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.mechanism import Mechanism
from lightrl.sim.world import World


class Surplus(Mechanism):
    """What a group has too much runs on, and is scored, until its round closes."""

    def __init__(self, world: World) -> None:
        self._world = world
        # aborted by the core, but still running
        self._kept: dict[tuple[str, int], tuple[SimMachine, Response]] = {}

    def keeps(self, machine: SimMachine, response: str, number: int) -> bool:
        table = self._world.core.table
        round, kept = table.round, table.responses.get(response)
        if round is None or kept is None or round.cut == DECIDED:
            return False
        self._kept[response, number] = machine, kept
        return True

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        for d in deltas if self._kept else ():
            kept = self._kept.pop((d.response, d.attempt), None) if d.finished else None
            if kept is not None:
                self._world.reward_workers.defer(kept[1])

    def round_closed(self, round: Round) -> None:
        for (response, number), (machine, _) in self._kept.items():
            self._world.abort(machine, response, number)
        self._kept.clear()
