"""Continuous balance: move running responses to nodes that finish them sooner.

Owns the times at which moves are considered, and which running responses are stragglers;
`placement` decides whether a move pays. Nodes with room get waiting work first, except for a
response at a slow node that would finish last in the round. When no response waits, surplus work of
other nodes moves.
"""

from collections.abc import Sequence

from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses import placement
from lightrl.core.responses.placement import LengthForecast, taken_s, works_of
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.settings import Settings
from lightrl.core.state import Node, Response

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
        self._stragglers: list[Response] = []  # as of the last look; in order of finish
        self._settings = settings
        self._fleet = fleet
        self._table = table
        self._expect = expect

    def relieve(self) -> None:
        """Move stragglers into free slots where that pays; waiting responses get the slots that the
        stragglers leave."""
        if not self._stragglers:
            return
        if not self._table.queue:
            self._stragglers = []  # then `look` considers all running responses
            return
        for node in self._table.roomy():
            while self._stragglers and node.free > 0:
                response = self._stragglers[-1]
                if response.node is None:
                    self._stragglers.pop()
                    continue
                if not self._is_worth_moving(response, node):
                    break
                self._stragglers.pop()
                self._table.generate([(response, node)])

    def _is_worth_moving(self, response: Response, to: Node) -> bool:
        source = response.node
        if source is None or source is to or not to.running or not to.speed.num_observed:
            return False
        tokens = placement.remaining(response, self._expect)
        here = taken_s(tokens, source, len(source.running))
        there = taken_s(tokens, to, len(to.running) + 1)
        cost_s = placement.move_s(response, to, self._settings.chunk_tokens)
        return placement.pays(here, there, cost_s)

    def plan(self, now: float, has_ended: bool) -> None:
        """Set the deadline of the next look: soon after a node got room without waiting work, and
        while work waits. A look examines all nodes. Runs after every event."""
        if has_ended or not self._settings.migration or not self._is_worth_a_look():
            self.deadline = None
        elif self.deadline is None:
            pause_s = self._settings.look_pause * PAUSE_S
            pause_s += len(self._fleet.ready) * PAUSE_S_PER_NODE
            self.deadline = max(now, self._looked_at + pause_s)

    def _is_worth_a_look(self) -> bool:
        table, counters = self._table, self._table.counters
        if not table.queue:
            return table.has_idle_room
        if len(self._fleet.ready) < 2 or not table.num_running:
            return False
        # before the first tokens no node can be classified as slow
        return counters.rollout_tokens + counters.eval_tokens > 0

    def look(self, now: float) -> None:
        """Move running responses, or update the stragglers, if the deadline has passed."""
        if self.deadline is None or now < self.deadline:
            return
        self.deadline, self._looked_at = None, now
        ready = self._fleet.ready.values()
        if self._table.queue:
            tokens = self._table.queue.tokens
            self._stragglers = stragglers(list(ready), tokens, self._expect)
            return
        nodes = [n for n in ready if n.speed.num_observed or not n.running]
        chunk_tokens = self._settings.chunk_tokens
        self._table.generate(placement.moves(nodes, self._expect, chunk_tokens))
        self._table.mark_idle()  # for the next look: a prediction may turn out wrong meanwhile


SLOW = 1.25  # times as long as at the fastest, for a token


def stragglers(
    nodes: Sequence[Node], waiting_tokens: float, foresee: LengthForecast
) -> list[Response]:
    """Return the responses that would still run after all others could be done; the last at the
    end.

    The earliest end of all work is estimated from the tokens of running and waiting responses and
    the best throughput of all nodes. O(nodes), plus O(running responses) if a node is slow.
    """
    busy = [n for n in nodes if n.running and n.speed.num_observed]
    paces = {n.name: n.speed.step_s(len(n.running)) for n in busy}
    fastest = min(paces.values(), default=0.0)
    slow = {n.name for n in busy if paces[n.name] > SLOW * fastest}
    if not slow:
        return []
    works = {n.name: works_of(n, foresee) for n in busy}
    tokens = waiting_tokens + sum(left for many in works.values() for left, _ in many)
    done_s = tokens / sum(n.slots / n.speed.step_s(n.slots) for n in nodes)
    late = [
        (taken_s(left, n, len(n.running))[0], r.id, r)
        for n in busy
        if n.name in slow
        for left, r in works[n.name]
    ]
    return [r for seconds, _, r in sorted(late, key=lambda x: x[:2]) if seconds > done_s]
