"""Nodes that pull weights from several sources and serve what they have, modelled as a fluid.

Owns how far each node is. Decides nothing that the core decides: the sources of each node are
given. Peers come before the last resort, the trainer. Quick enough for a thousand nodes. What is
approximated:

- Buckets are infinitely small: a node relays what arrives in the moment in which it arrives, and a
  bucket is never on its way to two nodes that could have had it from each other. What is new to
  those who pull comes to them once, at the rate at which all complete sources of theirs send
  together; none of them is ahead of the sum of that, and the last resort sends nothing twice to
  nodes that have peers (the bounds of Kumar and Ross, Peer-assisted file distribution: the minimum
  distribution time, 2006). Behind it, any node has something for any other that takes it for a
  source.
  Exact for many small buckets where all know each other (within 12 % for 512 buckets and up to 16
  nodes, see tests/sim/test_swarm.py). Where 32 know 16 each, some buckets leave the trainer twice,
  which is not seen here: 1.3 times as long for 477 buckets, 1.7 times for 120.
- Rates hold for GRAIN of a pull, and who has all but half of that has all.
- What a dead source owed is asked of others at once; what only nodes that are gone had got is new
  once more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightrl.sim.lines import fair_rates

GRAIN = 0.01


class Parcel(NamedTuple):
    """What can be pulled: a version, or how it differs from its base."""

    version: int
    # -1 = the whole
    base: int = -1


class Arrived(NamedTuple):
    """A node has all of it now. Bytes: those that this pull transferred, from others than the last
    resort. The first node of a path has sent it to all behind it."""

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
    """The pulls under way and the nodes that hold what. Times never go back; `next_at` is when to
    `advance` next. `sent`: bytes that each node has sent."""

    def __init__(self, last_resort: str) -> None:
        self.sent: dict[str, float] = {}
        self._last_resort = last_resort
        self._up: dict[str, float] = {}
        self._down: dict[str, float] = {}
        self._pulls: dict[str, _Pull] = {}  # by node
        self._send: _Send | None = None
        self._whole: set[tuple[str, Parcel]] = set()
        self._new: dict[Parcel, float] = {}  # bytes that have come to those who pull
        self._new_rates: dict[Parcel, float] = {}
        self._sending: dict[str, float] = {}  # bytes per second, by source
        self._now = 0.0
        self._shared_at = 0.0
        self._is_stale = False  # all rates

    def add_node(self, node: str, up: float, down: float) -> None:
        """Bytes per second of its line, in each direction."""
        self._up[node], self._down[node] = up, down
        self.sent.setdefault(node, 0.0)

    def hold(self, now: float, node: str, parcel: Parcel) -> None:
        """It holds all of this and serves it."""
        self._move(now)
        self._whole.add((node, parcel))
        self._is_stale = True

    def pull(
        self, now: float, node: str, parcel: Parcel, num_bytes: float, sources: Sequence[str]
    ) -> None:
        """From now on, instead of another parcel, or from these sources too; it keeps what it
        has."""
        self._move(now)
        pull = self._pulls.get(node)
        if pull is None or pull.parcel != parcel:
            pull = self._pulls[node] = _Pull(parcel, num_bytes, num_bytes)
        pull.sources |= dict.fromkeys(sources)
        self._is_stale = True

    def left(self, now: float, node: str, parcel: Parcel) -> float | None:
        """Bytes of what it pulls, None if that is something else."""
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
        """From the first node to all others, none of which serves it: each passes on to the next
        what it gets, in the moment in which it gets it. There is one path at a time."""
        self.end_send(now)
        self._send = _Send(path, parcel, num_bytes, num_bytes)

    def end_send(self, now: float) -> None:
        self._move(now)
        self._send, self._is_stale = None, True

    def lose(self, now: float, node: str) -> None:
        """It serves and holds nothing any more; nodes that pull from it use their other sources."""
        self.end_pull(now, node)
        self._whole = {(n, p) for n, p in self._whole if n != node}
        self._is_stale = True

    def forget(self, before: int) -> None:
        """Nobody will ask for parcels of versions before this one."""
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
        flows = [(s, node) for node, p in self._pulls.items() for s in self._sources(node, p)]
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

    def _sources(self, node: str, pull: _Pull) -> list[str]:
        """Those who send to it: peers that have something, and the last resort while no peer has
        it."""
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
        """Sum of what comes from those who have all of it; `once`: of each source, not flow."""
        total: dict[Parcel, float] = {}
        seen: set[tuple[str, Parcel]] = set()
        for (source, node), rate in zip(flows, rates, strict=True):
            key = (source, self._pulls[node].parcel)
            if key in self._whole and not (once and key in seen):
                seen.add(key)
                total[key[1]] = total.get(key[1], 0.0) + rate
        return total
