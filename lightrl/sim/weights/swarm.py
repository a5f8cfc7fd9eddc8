"""Nodes that pull weights from the trainer and from each other, modelled as a fluid.

All rollout nodes have equal lines, and buckets are infinitely small. Of a version that no other
node holds, the trainer sends each byte once, and the nodes that pull it exchange the rest (the
bounds of Kumar and Ross, Peer-assisted file distribution: the minimum distribution time, 2006):

- A node that is ahead of the others gets new bytes at the rate at which the trainer sends, or the
  nodes that hold all of it; one that is behind gets its share of all outbound lines.
- The trainer's line is divided equally among the parcels that it sends.

Rates are constant between two changes. Real pulls of 32 nodes that know 16 others each take 1.3
times as long, since some buckets leave the trainer twice.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

COMPLETE = 1e-6  # the missing share of a parcel that counts as nothing


class Parcel(NamedTuple):
    """A unit that can be pulled: a version, or the delta to its base."""

    version: int
    # -1 = the whole version
    base: int = -1


@dataclass(slots=True)
class SimPull:
    """Parcels on their way to one node, in this order, with their bytes."""

    parcels: deque[tuple[Parcel, float]]
    # of the first parcel
    left: float
    # of the whole pull, once it is complete
    seconds: float = 0.0
    # of all parcels that have arrived
    num_bytes: float = 0.0
    peer_bytes: float = 0.0
    delta_bytes: float = 0.0
    rate: float = 0.0
    peer_share: float = 0.0

    @property
    def parcel(self) -> Parcel:
        return self.parcels[0][0]

    @property
    def size(self) -> float:
        return self.parcels[0][1]


class FluidSwarm:
    """The current pulls, and which nodes hold which parcels. Times never decrease; call `advance`
    at `next_at`. `sent`: bytes that the trainer has sent."""

    def __init__(self, sender: float, relay: float, receiver: float, relays: bool = True) -> None:
        """Bytes per second: of the trainer's line; of a node's line, outbound and inbound.

        Without `relays` all nodes pull from the trainer alone."""
        self.sent = 0.0
        self._sender, self._relay, self._receiver = sender, relay, receiver
        self._relays = relays
        self._pulls: dict[str, SimPull] = {}  # by node
        self._held: set[tuple[str, Parcel]] = set()  # by nodes other than the trainer
        self._sent_rate = 0.0
        self._catches_up_s = math.inf  # until a node has as much as those ahead of it
        self._now = 0.0

    def hold(self, now: float, node: str, parcel: Parcel) -> None:
        """The node holds all of it and serves it."""
        self._move(now)
        self._held.add((node, parcel))
        self._share()

    def pull(self, now: float, node: str, parcels: Iterable[tuple[Parcel, float]]) -> SimPull:
        """Start a pull instead of an earlier one; what has arrived of the same parcel counts."""
        self._move(now)
        before, queue = self._pulls.get(node), deque(parcels)
        parcel, size = queue[0]
        left = before.left if before is not None and before.parcel == parcel else size
        pull = self._pulls[node] = SimPull(queue, left)
        self._share()
        return pull

    def left(self, now: float, node: str, parcel: Parcel) -> float | None:
        """Return the missing bytes of a parcel, None if the node does not pull it now."""
        self._move(now)
        pull = self._pulls.get(node)
        return pull.left if pull is not None and pull.parcel == parcel else None

    def end_pull(self, now: float, node: str) -> None:
        self._move(now)
        if self._pulls.pop(node, None) is not None:
            self._share()

    def lose(self, now: float, node: str) -> None:
        """Remove what the node pulls and holds."""
        self._move(now)
        self._pulls.pop(node, None)
        self._held = {(n, p) for n, p in self._held if n != node}
        self._share()

    def forget(self, before: int) -> None:
        """Remove parcels of versions before this one."""
        self._held = {(n, p) for n, p in self._held if p.version >= before}
        self._share()

    def next_at(self) -> float:
        """Return when a parcel is complete, or rates change."""
        ends = (pull.left / pull.rate for pull in self._pulls.values() if pull.rate > 0)
        return self._now + min(min(ends, default=math.inf), self._catches_up_s)

    def advance(self, now: float) -> list[tuple[str, SimPull]]:
        """Return the nodes whose pulls are complete."""
        self._move(now)
        done: list[tuple[str, SimPull]] = []
        for node, pull in list(self._pulls.items()):
            if pull.left > COMPLETE * pull.size:
                continue
            parcel, size = pull.parcels.popleft()
            self._held.add((node, parcel))
            pull.num_bytes += size
            pull.delta_bytes += size if parcel.base >= 0 else 0.0
            if pull.parcels:
                pull.left = pull.size
            else:
                del self._pulls[node]
                done.append((node, pull))
        self._share()
        return done

    def _move(self, now: float) -> None:
        elapsed, self._now = max(0.0, now - self._now), max(now, self._now)
        self.sent += self._sent_rate * elapsed
        for pull in self._pulls.values():
            pull.left -= pull.rate * elapsed
            pull.peer_bytes += pull.peer_share * pull.rate * elapsed
        self._catches_up_s -= elapsed

    def _share(self) -> None:
        """Set all rates."""
        groups: dict[tuple[Parcel, str], list[SimPull]] = {}
        for node, pull in self._pulls.items():
            groups.setdefault((pull.parcel, "" if self._relays else node), []).append(pull)
        num_held = dict.fromkeys(groups, 0)
        for _, parcel in self._held if self._relays else ():
            if (parcel, "") in num_held:
                num_held[parcel, ""] += 1
        line = self._sender / max(1, sum(num == 0 for num in num_held.values()))
        self._sent_rate, self._catches_up_s = 0.0, math.inf
        for key, group in groups.items():
            self._share_in(group, num_held[key] * self._relay, line)

    def _share_in(self, group: list[SimPull], held: float, line: float) -> None:
        """Set the rates of pulls of one parcel. Bytes per second: `held` of the nodes that hold all
        of it, which send in place of the trainer; `line` of the trainer."""
        new = held or line
        exchanged = self._relay * len(group) if len(group) > 1 else 0.0
        each = min(self._receiver, (new + exchanged) / len(group))
        ahead = min(each, new)
        least = min(pull.left for pull in group)
        for pull in group:
            lag = pull.left - least
            is_behind = lag > COMPLETE * pull.size
            pull.rate = each if is_behind else ahead
            if is_behind and each > ahead:
                self._catches_up_s = min(self._catches_up_s, lag / (each - ahead))
        total = sum(pull.rate for pull in group)
        sent = 0.0 if held else min(new, max(ahead, total - exchanged))
        self._sent_rate += sent
        for pull in group:
            pull.peer_share = 1 - sent / total
