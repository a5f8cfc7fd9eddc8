"""Half of the devices go over to training while responses still run: what both rules do without
preemptible nodes. Pure.

RollPacker's stream trainer (arXiv 2509.21009, algorithm 1): once in a round, looked at whenever
another 5 % of the responses have finished, between 20 and 50 %, and only if the other half has
slots and cache for what is left. `again` goes on so with halves of the rest, for as long as few
responses run on those that stay: then these stay fast, and a tail needs no more of them.
"""

from dataclasses import dataclass

from lightrl.core.offload import NOTHING, Change, View

FIRST_LOOK, LAST_LOOK, LOOK_EVERY = 0.2, 0.5, 0.05  # responses finished, of those launched
LAST_LOOK_AGAIN = 0.95
SLOTS_AGAIN = 0.2  # of those that stay may be used when more than the first half go


@dataclass
class ScaleDown:
    again: bool = False
    _opened_at: float = float("nan")
    _next_look: float = FIRST_LOOK

    def decide(self, view: View) -> Change:
        if view.opened_at != self._opened_at:
            self._opened_at, self._next_look = view.opened_at, FIRST_LOOK
        if not view.in_parts or view.finished < self._next_look:
            return NOTHING
        if view.released and not self.again:
            return NOTHING
        while self._next_look <= view.finished:
            self._next_look += LOOK_EVERY
        last = LAST_LOOK_AGAIN if self.again else LAST_LOOK
        if view.finished >= last + LOOK_EVERY:  # the last look may have come late
            return NOTHING
        going = view.emptiest(len(view.sampling) // 2)
        staying = view.without(going)
        room = (SLOTS_AGAIN if view.released else 1.0) * sum(node.slots for node in staying)
        if not going or view.num > room or not view.fits(staying):
            return NOTHING
        return Change(release=tuple(o.node.name for o in going))
