"""Which node gets which response. Pure functions of a view of the nodes; no state, no messages."""

import heapq
from collections.abc import Iterable, Sequence

from lightrl.core.state import Node


def assign(responses: Sequence[str], nodes: Iterable[Node]) -> list[tuple[str, str]]:
    """(response, node) for as many of `responses`, in order, as `nodes` have free slots.

    Credit-based: a node never holds more than its slots, the rest waits. Each response goes to the
    node with the smallest share of its slots in use; the name breaks ties, so runs repeat.
    O((responses + nodes) log nodes).
    """
    free = [
        (len(n.running) / n.slots, n.name, len(n.running), n.slots) for n in nodes if len(n.running) < n.slots
    ]
    heapq.heapify(free)
    placed: list[tuple[str, str]] = []
    for response in responses:
        if not free:
            break
        _, name, running, slots = free[0]
        placed.append((response, name))
        running += 1
        if running < slots:
            heapq.heapreplace(free, (running / slots, name, running, slots))
        else:
            heapq.heappop(free)
    return placed
