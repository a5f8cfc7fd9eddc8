"""Bandwidth on the lines of a fleet: what share each flow gets, and when the next one is through.

Owns the rates and the bytes that are left. Each node has one line that is shared in each direction
by itself; whatever lies between two lines is never full. Knows neither nodes that fail nor what is
sent; rates are bytes per second.

Shares are max-min fair, as TCP connections of equal round trips come near to: no flow can get more
without taking from one that has no more than it. Found by progressive filling (Bertsekas and
Gallager, Data Networks, 2nd edition 1992, section 6.5.2): all flows grow together until a line is
full; its flows keep what they have then, the others go on growing.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

F = TypeVar("F", bound=Hashable)

# Bytes for so many seconds count as nothing; clocks that show late times are not finer.
ROUNDING_S, ROUNDING = 1e-9, 1e-12


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


@dataclass(slots=True)
class _Flow:
    path: tuple[str, ...]
    # bytes
    left: float
    rate: float = 0.0


class Lines(Generic[F]):
    """Flows with names of the caller's; one that is through stays until it is closed or goes on."""

    def __init__(self) -> None:
        self.up: dict[str, float] = {}
        self.down: dict[str, float] = {}
        self.now = 0.0
        self._flows: dict[F, _Flow] = {}
        self._is_stale = False  # the rates

    def add_node(self, node: str, up: float, down: float) -> None:
        self.up[node], self.down[node] = up, down

    def open(self, flow: F, path: tuple[str, ...], num_bytes: float) -> None:
        """From now on, in the place of what had its name; all nodes must be known."""
        self._flows[flow] = _Flow(path, num_bytes)
        self._is_stale = True

    def go_on(self, flow: F, num_bytes: float) -> None:
        """So much more, from where it is now, between the same nodes; no rate changes."""
        self._flows[flow].left = num_bytes

    def left(self, flow: F) -> float:
        """Bytes, at the time of the last `advance`."""
        return max(0.0, self._flows[flow].left)

    def close(self, flow: F) -> None:
        """Also of one that is not there."""
        if self._flows.pop(flow, None) is not None:
            self._is_stale = True

    def next_at(self) -> float:
        """When the next flow is through, as things stand; infinity: none ever."""
        self._share()
        times = (f.left / f.rate for f in self._flows.values() if f.rate > 0)
        return self.now + max(0.0, min(times, default=math.inf))

    def advance(self, now: float) -> list[F]:
        """Moves bytes until `now`, which lies not after `next_at`; returns what is through."""
        self._share()
        elapsed, self.now = max(0.0, now - self.now), max(now, self.now)
        rounding_s = ROUNDING_S + ROUNDING * self.now
        done: list[F] = []
        for name, flow in self._flows.items():
            flow.left -= flow.rate * elapsed
            if flow.left <= flow.rate * rounding_s:
                done.append(name)
        return done

    def _share(self) -> None:
        if not self._is_stale:
            return
        flows = self._flows.values()
        paths = [f.path for f in flows]
        for flow, rate in zip(flows, fair_rates(paths, self.up, self.down), strict=True):
            flow.rate = rate
        self._is_stale = False
