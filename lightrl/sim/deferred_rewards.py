"""Rewards that are computed when the rollout is over, and what follows from that, for comparison.

Owns the responses that have finished and have no score yet. The core is told a score at once; the
time that all of them take is added to the step. A system that has no scores cannot know which
groups are complete, so it may let the surplus of a group run on (`Switches.surplus_ends`).
"""

from collections.abc import Sequence

from lightrl.core.race import DECIDED
from lightrl.core.state import Response, Round
from lightrl.sim.engine import SimDelta
from lightrl.sim.machines import SimMachine
from lightrl.sim.mechanism import Mechanism, Simulation


class DeferredRewards(Mechanism):
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._unscored: dict[str, Response] = {}  # that have finished
        self._surplus: dict[
            tuple[str, int], tuple[SimMachine, Response]
        ] = {}  # given up by the core, but goes on

    def defer(self, response: Response) -> None:
        self._unscored[response.id] = response

    def goes_on(self, machine: SimMachine, name: str, number: int) -> bool:
        """Whether what the core gives up continues until its round closes."""
        core, response = self._world.core, self._world.core.table.responses.get(name)
        round = core.table.round
        if (
            self._world.switches.surplus_ends
            or round is None
            or response is None
            or round.cut == DECIDED
        ):
            return False
        self._surplus[name, number] = machine, response
        return True

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        """After tokens came: surplus that has finished is scored as well."""
        if self._surplus:
            for d in deltas:
                if d.finished is not None and (
                    found := self._surplus.pop((d.response, d.attempt), None)
                ):
                    self.defer(found[1])

    def round_closed(self, round: Round) -> None:
        for (name, number), (machine, _) in self._surplus.items():
            self._world.abort(machine, name, number)
        self._surplus.clear()

    def scored_at(self) -> float:
        """When the rewards of all that has finished are known, if that begins now."""
        done, self._unscored = self._unscored, {}
        return self._world.scoring.all_done_at(self._world.now, done.values())
