"""Continuous balance: move running responses to nodes that finish them sooner.

Owns the times at which moves are considered; `placement` decides whether a move pays. Nodes with
room get waiting work first: work of other nodes moves when no response waits.
"""

from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses import placement
from lightrl.core.responses.placement import LengthForecast
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.settings import Settings

# Minimum seconds between two calls of `look`, and additional seconds for each node: `look` then
# takes under one percent of the time.
PAUSE_S = 0.5
PAUSE_S_PER_NODE = 0.002


class Balance:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        table: ResponseTable,
        expect: LengthForecast,
        now: float,
    ) -> None:
        self.deadline: float | None = None  # of the next look
        self._looked_at = now
        self._settings = settings
        self._fleet = fleet
        self._table = table
        self._expect = expect

    def plan(self, now: float, has_ended: bool) -> None:
        """Set the deadline of the next look if a node has room and no work waits. A look examines
        all nodes. Runs after every event."""
        if has_ended or not self._settings.migration or not self._table.has_unused_room:
            self.deadline = None
        elif self.deadline is None:
            pause_s = self._settings.look_pause * PAUSE_S
            pause_s += len(self._fleet.ready) * PAUSE_S_PER_NODE
            self.deadline = max(now, self._looked_at + pause_s)

    def look(self, now: float) -> None:
        """Move running responses if the deadline has passed."""
        if self.deadline is None or now < self.deadline:
            return
        self.deadline, self._looked_at = None, now
        nodes = [n for n in self._fleet.ready.values() if n.speed.num_observed or not n.running]
        chunk_tokens = self._settings.chunk_tokens
        self._table.dispatch(placement.choose_migrations(nodes, self._expect, chunk_tokens))
        self._table.mark_unused()  # for the next look: a prediction may turn out wrong meanwhile
