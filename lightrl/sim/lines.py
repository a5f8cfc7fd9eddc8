"""Bandwidth on the lines of a fleet: the share that each flow gets.

Each node has one line that is shared in each direction by itself; whatever lies between two lines
is never full. Rates are bytes per second.

Shares are max-min fair, as TCP connections of equal round trips come near to: no flow can get more
without taking from one that has no more than it. Found by progressive filling (Bertsekas and
Gallager, Data Networks, 2nd edition 1992, section 6.5.2): all flows grow together until a line is
full; its flows keep what they have then, the others go on growing.
"""

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush


def fair_rates(
    flows: Sequence[Sequence[str]], up: Mapping[str, float], down: Mapping[str, float]
) -> list[float]:
    """The rate of each flow, with these rates of the nodes' lines. A flow goes from its first node
    to its last, through those between, if any, at one rate all the way.

    In O(n log n): the share that a line can give only grows while other lines fill up, so a stale
    entry of the heap is always too early, never too late.
    """
    members: dict[tuple[bool, str], list[int]] = {}
    crossed = [[*((True, n) for n in f[:-1]), *((False, n) for n in f[1:])] for f in flows]
    for k, lines in enumerate(crossed):
        for line in lines:
            members.setdefault(line, []).append(k)
    left = {line: (up if line[0] else down)[line[1]] for line in members}
    growing = {line: len(flows) for line, flows in members.items()}
    heap = [(left[line] / growing[line], line) for line in members]
    heapify(heap)
    rates = [math.nan] * len(flows)
    while heap:
        share, line = heappop(heap)
        if not growing[line]:
            continue
        if (grown := max(0.0, left[line]) / growing[line]) > share:
            heappush(heap, (grown, line))
            continue
        for k in members[line]:
            if math.isnan(rates[k]):
                rates[k] = grown
                for full in crossed[k]:
                    left[full] -= grown
                    growing[full] -= 1
    return rates
