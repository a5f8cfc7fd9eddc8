"""Nodes that pull weights from several sources at once, bucket by bucket, and serve what they have:
what `lightrl.sim.weights.swarm.Swarm` approximates.

The sources of each node are given. Exact but for this: a version has at most MAX_BUCKETS buckets,
larger ones where it is large; a request takes no time of its own, nor does proving; and a node asks
each source for one bucket at a time.

As the real ones do, each node has its own order of buckets, peers come before the last resort (the
trainer), which is asked only for what none of a node's peers holds or is getting from somebody who
has all, and what a dead source owed is asked of others after a while.
"""

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from lightrl.sim.weights.swarm import Arrived, Parcel, fair_rates

F = TypeVar("F", bound=Hashable)

# Bytes for so many seconds count as nothing; clocks that show late times are not finer.
ROUNDING_S, ROUNDING = 1e-9, 1e-12

MAX_BUCKETS = 512
MISSED_AFTER_S = 0.1  # a source that is gone
NOTHING = -1  # was asked for
PATH = ("", "")  # the flow along a path: others are called (source, destination)
_NONE: set[int] = set()


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


@dataclass(slots=True)
class _Send:
    path: tuple[str, ...]
    parcel: Parcel
    num_bytes: float


@dataclass(slots=True)
class _Pull:
    parcel: Parcel
    bucket_bytes: float
    # neither held nor asked for, in this node's order
    missing: dict[int, None]
    sources: dict[str, None] = field(default_factory=dict[str, None])
    num_bytes: float = 0.0
    peer_bytes: float = 0.0
    # what each source is at
    asked: dict[str, int] = field(default_factory=dict[str, int])


class BucketSwarm:
    """What a transfer needs. Times never go back; `next_at` is when to `advance` next. `sent`:
    bytes that each node has sent."""

    def __init__(self, last_resort: str, bucket_bytes: float) -> None:
        self.sent: dict[str, float] = {}
        self._last_resort = last_resort
        self._bucket_bytes = bucket_bytes
        self._lines: Lines[tuple[str, str]] = Lines()
        self._send: _Send | None = None
        self._pulls: dict[str, _Pull] = {}  # by node
        self._held: dict[tuple[str, Parcel], set[int]] = {}  # of those who hold a part
        self._whole: set[tuple[str, Parcel]] = set()
        self._missed: list[tuple[float, str, str, int]] = []  # heap: when, node, source, bucket

    def add_node(self, node: str, up: float, down: float) -> None:
        """Bytes per second of its line, in each direction."""
        self._lines.add_node(node, up, down)
        self.sent.setdefault(node, 0.0)

    def hold(self, now: float, node: str, parcel: Parcel) -> None:
        """It holds all of this and serves it."""
        self._lines.advance(now)  # what is through there is told by the next `advance`
        self._whole.add((node, parcel))
        self._held.pop((node, parcel), None)
        self._ask_of(node)

    def pull(
        self, now: float, node: str, parcel: Parcel, num_bytes: float, sources: Sequence[str]
    ) -> None:
        """From now on, instead of another parcel, or from these sources too; it keeps what it
        has."""
        pull = self._pulls.get(node)
        if pull is None or pull.parcel != parcel:
            self.end_pull(now, node)
            num = max(1, min(MAX_BUCKETS, math.ceil(num_bytes / self._bucket_bytes)))
            held = self._held.setdefault((node, parcel), set())
            is_whole = (node, parcel) in self._whole
            order = [k for k in range(num) if not is_whole and k not in held]
            if not order:
                heappush(self._missed, (now, node, node, NOTHING))  # the next `advance` sees it
            random.Random(f"{node} {parcel}").shuffle(order)
            pull = self._pulls[node] = _Pull(parcel, num_bytes / num, missing=dict.fromkeys(order))
        self._lines.advance(now)
        pull.sources |= dict.fromkeys(sources)
        for source in pull.sources:
            self._ask(node, pull, source)

    def left(self, now: float, node: str, parcel: Parcel) -> float | None:
        """Bytes of what it pulls, None if that is something else."""
        pull = self._pulls.get(node)
        if pull is None or pull.parcel != parcel:
            return None
        return (len(pull.missing) + len(pull.asked)) * pull.bucket_bytes

    def end_pull(self, now: float, node: str) -> None:
        self._lines.advance(now)
        pull = self._pulls.pop(node, None)
        for source in pull.asked if pull is not None else ():
            self._lines.close((source, node))

    def send(self, now: float, path: tuple[str, ...], parcel: Parcel, num_bytes: float) -> None:
        """From the first node to all others, none of which serves it: each passes on to the next
        what it gets, in the moment in which it gets it. There is one path at a time."""
        self.end_send(now)
        self._send = _Send(path, parcel, num_bytes)
        self._lines.open(PATH, path, num_bytes)

    def end_send(self, now: float) -> None:
        self._lines.advance(now)
        send, self._send = self._send, None
        if send is not None:
            for node in send.path[:-1]:
                self.sent[node] += send.num_bytes - self._lines.left(PATH)
            self._lines.close(PATH)

    def lose(self, now: float, node: str) -> None:
        """It serves and holds nothing any more; those who pull from it find out after a while."""
        self.end_pull(now, node)
        self._whole = {(n, p) for n, p in self._whole if n != node}
        self._held = {(n, p): b for (n, p), b in self._held.items() if n != node}
        for name, pull in self._pulls.items():
            if node in pull.sources:
                self._lines.close((node, name))
                del pull.sources[node]
                bucket = pull.asked.get(node, NOTHING)
                heappush(self._missed, (now + MISSED_AFTER_S, name, node, bucket))

    def forget(self, before: int) -> None:
        """Nobody will ask for parcels of versions before this one."""
        self._whole = {(n, p) for n, p in self._whole if p.version >= before}
        self._held = {(n, p): b for (n, p), b in self._held.items() if p.version >= before}

    def next_at(self) -> float:
        missed_at = self._missed[0][0] if self._missed else math.inf
        return min(missed_at, self._lines.next_at())

    def advance(self, now: float) -> list[Arrived]:
        arrived: list[Arrived] = []
        for flow in self._lines.advance(now):
            if flow != PATH:
                self._take(flow[1], self._pulls[flow[1]], flow[0])
            elif (send := self._send) is not None:
                self.end_send(now)
                arrived.append(Arrived(send.path[0], send.parcel, send.num_bytes, 0.0))
        while self._missed and self._missed[0][0] <= now:
            _, node, source, bucket = heappop(self._missed)
            if (pull := self._pulls.get(node)) is None:
                continue
            if pull.asked.get(source) == bucket:
                del pull.asked[source]
                pull.missing[bucket] = None
            for other in pull.sources:
                self._ask(node, pull, other)
        for node, pull in list(self._pulls.items()):
            if not pull.missing and not pull.asked:
                del self._pulls[node]
                self.hold(now, node, pull.parcel)
                arrived.append(Arrived(node, pull.parcel, pull.num_bytes, pull.peer_bytes))
        return arrived

    def _take(self, node: str, pull: _Pull, source: str) -> None:
        """A bucket is there; the source is asked for another one."""
        self._held[node, pull.parcel].add(pull.asked.pop(source))
        self.sent[source] += pull.bucket_bytes
        pull.num_bytes += pull.bucket_bytes
        pull.peer_bytes += pull.bucket_bytes if source != self._last_resort else 0.0
        bucket = self._choose(pull, source)
        if bucket is None:
            self._lines.close((source, node))
        else:
            pull.asked[source] = bucket
            del pull.missing[bucket]
            self._lines.go_on((source, node), pull.bucket_bytes)
        self._ask_of(node)

    def _ask_of(self, source: str) -> None:
        """Those who wait for something new there."""
        for node, pull in self._pulls.items():
            if source in pull.sources and source not in pull.asked:
                self._ask(node, pull, source)

    def _ask(self, node: str, pull: _Pull, source: str) -> None:
        if source not in pull.asked and (bucket := self._choose(pull, source)) is not None:
            pull.asked[source] = bucket
            del pull.missing[bucket]
            self._lines.open((source, node), (source, node), pull.bucket_bytes)

    def _choose(self, pull: _Pull, source: str) -> int | None:
        """The first that it holds; of the last resort none that peers have or will have soon."""
        is_whole = (source, pull.parcel) in self._whole
        held = self._held.get((source, pull.parcel), _NONE)
        elsewhere: list[set[int]] = []
        if source == self._last_resort:
            if any((s, pull.parcel) in self._whole for s in pull.sources if s != source):
                return None
            elsewhere = [self._held.get((s, pull.parcel), _NONE) for s in pull.sources]
            elsewhere.append(self._coming(pull))
        for bucket in pull.missing:
            if (is_whole or bucket in held) and not any(bucket in e for e in elsewhere):
                return bucket
        return None

    def _coming(self, pull: _Pull) -> set[int]:
        """What its peers are getting from somebody who has all."""
        peers = (self._pulls.get(s) for s in pull.sources)
        return {
            bucket
            for peer in peers
            if peer is not None and peer.parcel == pull.parcel
            for source, bucket in peer.asked.items()
            if (source, pull.parcel) in self._whole
        }
