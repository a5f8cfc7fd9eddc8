"""Nodes that pull weights from several sources and serve what they have, modelled as a fluid.

The core chooses the sources of each node; peers come before the last resort, the trainer. Fast
enough for a thousand nodes. Approximations:

- Buckets are infinitely small: a node relays bytes at the moment at which they arrive, and no
  bucket is sent to two nodes that could have had it from each other. New bytes reach the pulling
  nodes at the rate at which all complete sources send together; no node is ahead of that sum, and
  the last resort sends nothing twice to nodes that have peers (the bounds of Kumar and Ross,
  Peer-assisted file distribution: the minimum distribution time, 2006). Behind it, any node has
  something for any other that pulls from it. Exact for many small buckets where all know each other
  (within 12 % for 512 buckets and up to 16 nodes, see tests/sim/test_swarm.py). Where 32 know 16
  each, some buckets leave the trainer twice, which is not modelled: real pulls take 1.3 times as
  long for 477 buckets, 1.7 times for 120.
- Rates are constant for GRAIN of a pull, and a pull with all but half of that is complete.
- Bytes that a lost source owed are requested from others immediately; bytes that only lost nodes
  had are new again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

GRAIN = 0.01


class Parcel(NamedTuple):
    """What can be pulled: a version, or the delta to its base."""

    version: int
    # -1 = the whole version
    base: int = -1


class Arrived(NamedTuple):
    """A pull is complete, or the first node of a path has sent to all others. Bytes: transferred,
    and those from peers."""

    node: str
    parcel: Parcel
    num_bytes: float
    peer_bytes: float


@dataclass(slots=True)
class _Pull:
    parcel: Parcel
    num_bytes: float
    left: float
    sources: dict[str, None] = field(default_factory=dict[str, None])
    rate: float = 0.0
    peer_rate: float = 0.0
    peer_bytes: float = 0.0


@dataclass(slots=True)
class _Send:
    path: tuple[str, ...]
    parcel: Parcel
    num_bytes: float
    left: float
    rate: float = 0.0


class Swarm:
    """The current pulls, and which nodes hold which parcels. Times never decrease; call `advance`
    at `next_at`. `sent`: bytes that each node has sent."""

    def __init__(self, last_resort: str) -> None:
        self.sent: dict[str, float] = {}
        self._last_resort = last_resort
        self._up: dict[str, float] = {}
        self._down: dict[str, float] = {}
        self._pulls: dict[str, _Pull] = {}  # by node
        self._send: _Send | None = None
        self._whole: set[tuple[str, Parcel]] = set()
        self._new: dict[Parcel, float] = {}  # bytes that have reached a pulling node
        self._new_rates: dict[Parcel, float] = {}
        self._sending: dict[str, float] = {}  # bytes per second, by source
        self._now = 0.0
        self._shared_at = 0.0
        self._is_stale = False  # all rates

    def add_node(self, node: str, up: float, down: float) -> None:
        """`up`, `down`: bytes per second of its line."""
        self._up[node], self._down[node] = up, down
        self.sent.setdefault(node, 0.0)

    def hold(self, now: float, node: str, parcel: Parcel) -> None:
        """The node holds all of it and serves it."""
        self._move(now)
        self._whole.add((node, parcel))
        self._is_stale = True

    def pull(
        self, now: float, node: str, parcel: Parcel, num_bytes: float, sources: Sequence[str]
    ) -> None:
        """Start a pull, instead of one of another parcel, or add sources to it."""
        self._move(now)
        pull = self._pulls.get(node)
        if pull is None or pull.parcel != parcel:
            pull = self._pulls[node] = _Pull(parcel, num_bytes, num_bytes)
        pull.sources |= dict.fromkeys(sources)
        self._is_stale = True

    def left(self, now: float, node: str, parcel: Parcel) -> float | None:
        """Return the missing bytes of a pull, None if the node does not pull this parcel."""
        self._move(now)
        pull = self._pulls.get(node)
        return pull.left if pull is not None and pull.parcel == parcel else None

    def end_pull(self, now: float, node: str) -> None:
        self._move(now)
        pull = self._pulls.pop(node, None)
        if pull is not None:
            self._is_stale = True
            others = [p for p in self._pulls.values() if p.parcel == pull.parcel]
            self._new[pull.parcel] = max((p.num_bytes - p.left for p in others), default=0.0)

    def send(self, now: float, path: tuple[str, ...], parcel: Parcel, num_bytes: float) -> None:
        """Send along a path: each node relays to the next what it receives. None of them serves it.
        There is one path at a time."""
        self.end_send(now)
        self._send = _Send(path, parcel, num_bytes, num_bytes)

    def end_send(self, now: float) -> None:
        self._move(now)
        self._send, self._is_stale = None, True

    def lose(self, now: float, node: str) -> None:
        """Remove what it holds; nodes that pull from it use their other sources."""
        self.end_pull(now, node)
        self._whole = {(n, p) for n, p in self._whole if n != node}
        self._is_stale = True

    def forget(self, before: int) -> None:
        """Remove parcels of versions before this one."""
        self._whole = {(n, p) for n, p in self._whole if p.version >= before}
        pulled = {pull.parcel for pull in self._pulls.values()}
        self._new = {p: b for p, b in self._new.items() if p.version >= before or p in pulled}

    def next_at(self) -> float:
        self._share()
        soonest, grain_s = math.inf, math.inf
        if (send := self._send) is not None and send.rate > 0:
            soonest, grain_s = send.left / send.rate, GRAIN * send.num_bytes / send.rate
        for pull in self._pulls.values():
            if pull.rate <= 0:
                continue
            soonest = min(soonest, pull.left / pull.rate)
            grain_s = min(grain_s, GRAIN * pull.num_bytes / pull.rate)
            new, new_rate = self._new[pull.parcel], self._new_rates[pull.parcel]
            lag, closer = new - (pull.num_bytes - pull.left), pull.rate - new_rate
            if lag > 0 and closer > 0:
                soonest = min(soonest, lag / closer)
            if new_rate > 0 and new < pull.num_bytes:
                soonest = min(soonest, (pull.num_bytes - new) / new_rate)
        return max(self._now + soonest, self._shared_at + grain_s)

    def advance(self, now: float) -> list[Arrived]:
        self._move(now)
        self._is_stale = True
        arrived: list[Arrived] = []
        if (send := self._send) is not None and send.left <= GRAIN / 2 * send.num_bytes:
            self._send = None
            arrived.append(Arrived(send.path[0], send.parcel, send.num_bytes, 0.0))
        for node, pull in list(self._pulls.items()):
            if pull.left <= GRAIN / 2 * pull.num_bytes:
                del self._pulls[node]
                self._whole.add((node, pull.parcel))
                arrived.append(Arrived(node, pull.parcel, pull.num_bytes, pull.peer_bytes))
        return arrived

    def _move(self, now: float) -> None:
        elapsed = now - self._now
        if elapsed <= 0:
            return
        self._share()
        self._now = now
        for pull in self._pulls.values():
            pull.left -= pull.rate * elapsed
            pull.peer_bytes += pull.peer_rate * elapsed
        if self._send is not None:
            self._send.left -= self._send.rate * elapsed
        for parcel, rate in self._new_rates.items():
            self._new[parcel] += rate * elapsed
        for source, rate in self._sending.items():
            self.sent[source] += rate * elapsed

    def _share(self) -> None:
        if not self._is_stale:
            return
        self._is_stale, self._shared_at = False, self._now
        for pull in self._pulls.values():
            self._new.setdefault(pull.parcel, 0.0)
        flows = [(s, node) for node, p in self._pulls.items() for s in self._sources(p)]
        down = dict(self._down)
        can_be_new = self._from_whole(flows, [self._up[source] for source, _ in flows], once=True)
        for node, pull in self._pulls.items():
            pull.rate = pull.peer_rate = 0.0
            new = min(self._new[pull.parcel], pull.num_bytes)
            if pull.num_bytes - pull.left >= new - GRAIN / 2 * pull.num_bytes:
                down[node] = min(down[node], can_be_new.get(pull.parcel, 0.0))
        paths = [self._send.path] if self._send is not None else []
        rates = fair_rates([*flows, *paths], self._up, down)
        self._sending = {}
        if self._send is not None:
            self._send.rate = rates.pop()
            self._sending = dict.fromkeys(self._send.path[:-1], self._send.rate)
        for (source, node), rate in zip(flows, rates, strict=True):
            self._pulls[node].rate += rate
            self._pulls[node].peer_rate += rate if source != self._last_resort else 0.0
            self._sending[source] = self._sending.get(source, 0.0) + rate
        self._new_rates = self._from_whole(flows, rates, once=False)
        for pull in self._pulls.values():
            self._new_rates.setdefault(pull.parcel, 0.0)

    def _sources(self, pull: _Pull) -> list[str]:
        """Return the nodes that send to it: peers that have something, and the last resort while no
        peer has everything."""
        senders: list[str] = []
        a_peer_has_all = False
        for source in pull.sources:
            other = self._pulls.get(source)
            is_whole = (source, pull.parcel) in self._whole
            if source == self._last_resort:
                all_is_out = self._new[pull.parcel] >= (1 - GRAIN / 2) * pull.num_bytes
                if not is_whole or a_peer_has_all or (all_is_out and senders):
                    continue
            elif not is_whole and (other is None or other.parcel != pull.parcel):
                continue
            else:
                a_peer_has_all |= is_whole
            senders.append(source)
        return senders

    def _from_whole(
        self, flows: Sequence[tuple[str, str]], rates: Sequence[float], once: bool
    ) -> dict[Parcel, float]:
        """Return the rates from complete sources; `once`: of each source, not flow."""
        total: dict[Parcel, float] = {}
        seen: set[tuple[str, Parcel]] = set()
        for (source, node), rate in zip(flows, rates, strict=True):
            key = (source, self._pulls[node].parcel)
            if key in self._whole and not (once and key in seen):
                seen.add(key)
                total[key[1]] = total.get(key[1], 0.0) + rate
        return total


def fair_rates(
    flows: Sequence[Sequence[str]], up: Mapping[str, float], down: Mapping[str, float]
) -> list[float]:
    """Return the rate of each flow in bytes per second. A flow goes from its first node to its
    last, through those between, at one rate. `up` and `down`: bandwidth of each node's line.

    Rates are max-min fair, which TCP connections of equal round trips approximate, found by
    progressive filling (Bertsekas and Gallager, Data Networks, 2nd edition 1992, section 6.5.2):
    all flows grow together until a line is full, whose flows keep their rate then. In O(n log n):
    the share of a line only grows while other lines fill up, so a stale entry of the heap is always
    too early, never too late.
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
