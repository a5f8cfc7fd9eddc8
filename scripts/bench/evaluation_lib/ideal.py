"""How long an evaluation would take if all lengths were known, and less than which nothing takes.

Pure. An engine step with B responses takes `step_s` (1 + B / half_batch), so a node that makes n
steps for T tokens takes step_s n + step_s / half_batch T seconds.

- `even_s`: every node decodes as many tokens, none waits, and the longest response of all begins
  first. Longest first, over all nodes, comes within 2 % of it. But it is no bound: where slots are
  many, the longest are done sooner if they have some nodes nearly for themselves.
- `oracle_s`: the best of such schedules that were played.
- `bound_s`: nothing is faster.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fleet:
    """Example: Fleet(4, 64, 0.0095, 107.0)."""

    nodes: int
    slots: int
    step_s: float
    half_batch: float

    def took_s(self, batch: int) -> float:
        """Of an engine step."""
        return self.step_s * (1 + batch / self.half_batch)


def even_s(lengths: Sequence[int], fleet: Fleet) -> float:
    mean = sum(lengths) / fleet.nodes
    steps = max(mean / fleet.slots, *lengths)
    return fleet.step_s * steps + fleet.step_s / fleet.half_batch * mean


def bound_s(lengths: Sequence[int], fleet: Fleet) -> float:
    """At full batches each response gets x tokens a second, and the fleet nodes * slots * x.

    In t seconds the m longest, of at least l tokens, need d = l - x t more. Those that run at a
    node get y more a second, on average d / t, if no more than n run there, x + y = 1 / took_s(n);
    which costs the node step_s y / (step_s / half_batch) tokens a second, and takes m / n nodes, or
    one. This is convex in y, so that no other way to give it costs less, wherever they run.
    """
    longest = sorted(lengths, reverse=True)
    low, high = longest[0] * fleet.took_s(1), sum(lengths) * fleet.took_s(1)
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _may_do(longest, fleet, middle) else (middle, high)
    return low


def _may_do(longest: Sequence[int], fleet: Fleet, seconds: float) -> bool:
    full = 1 / fleet.took_s(fleet.slots)
    lost = 0.0
    for m, length in enumerate(longest, 1):
        more = length - full * seconds
        if more <= 0:
            break
        batch = (seconds / length / fleet.step_s - 1) * fleet.half_batch
        if batch <= 0 or m / batch > fleet.nodes:
            return False
        lost = max(lost, max(1.0, m / batch) * fleet.half_batch * more)
    return sum(longest) + lost <= fleet.nodes * fleet.slots * full * seconds


def oracle_s(lengths: Sequence[int], fleet: Fleet) -> float:
    """Some nodes take the longest, few at once, the others the rest; longest first."""
    hosts = {k for k in (1, 2, fleet.nodes // 2) if k < fleet.nodes}
    batches = [b for b in (24, 40, 64, 90) if b < fleet.slots]
    limits = [[b] * k + [fleet.slots] * (fleet.nodes - k) for k in hosts for b in batches]
    return min(play_s(lengths, fleet, many) for many in ([fleet.slots] * fleet.nodes, *limits))


def play_s(lengths: Sequence[int], fleet: Fleet, limits: Sequence[int]) -> float:
    """Nodes with room for so many: those with the least are filled first, from then on whoever has
    room takes the longest that waits. Nothing moves."""
    waiting = sorted(lengths)
    ends: list[list[int]] = [[] for _ in limits]  # of each node: in its steps so far
    steps, now = [0.0] * len(limits), 0.0
    for k in sorted(range(len(limits)), key=lambda k: limits[k]):
        alike = [j for j, limit in enumerate(limits) if limit == limits[k]]
        if not ends[k]:  # one each in turn
            for _ in range(limits[k]):
                for j in alike:
                    if waiting:
                        heapq.heappush(ends[j], waiting.pop())
    while any(ends):
        lefts = [(e[0] - n) * fleet.took_s(len(e)) for e, n in zip(ends, steps, strict=True) if e]
        took = min(lefts)
        now += took
        for k, mine in enumerate(ends):
            steps[k] += took / fleet.took_s(len(mine)) if mine else 0.0
            while mine and mine[0] <= steps[k] + 1e-6:
                heapq.heappop(mine)
            while waiting and len(mine) < limits[k]:
                heapq.heappush(mine, round(steps[k]) + waiting.pop())
    return now
