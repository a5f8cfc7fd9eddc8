"""Running responses that are worth a slot more than what waits: a slow node holds them, and they
would end the round.

A pure function of a view of the nodes. Whether one moves is decided when a node has room, on the
terms of `placement.pays`.
"""

from collections.abc import Sequence

from lightrl.core.placement import Foresee, taken_s, works_of
from lightrl.core.state import Node, Response

SLOW = 1.25  # times as long as at the fastest, for a token


def stragglers(nodes: Sequence[Node], waiting_tokens: float, foresee: Foresee) -> list[Response]:
    """Those that would run on where they are when everything else could be done; the last at the
    end.

    Done is everything, at the earliest, when all tokens that run and wait are sampled at the best
    throughput of all nodes together. O(nodes); with a slow one among them, what runs as well.
    """
    busy = [n for n in nodes if n.running and n.speed.num_observed]
    paces = {n.name: n.speed.step_s(len(n.running)) for n in busy}
    fastest = min(paces.values(), default=0.0)
    slow = {n.name for n in busy if paces[n.name] > SLOW * fastest}
    if not slow:
        return []
    works = {n.name: works_of(n, foresee) for n in busy}
    tokens = waiting_tokens + sum(w.steps for many in works.values() for w, _ in many)
    done_s = tokens / sum(n.speed.curve.best_rate(n.slots) for n in nodes)
    late = [
        (taken_s(w, n, len(n.running))[0], r.id, r)
        for n in busy
        if n.name in slow
        for w, r in works[n.name]
    ]
    return [r for seconds, _, r in sorted(late, key=lambda x: x[:2]) if seconds > done_s]
