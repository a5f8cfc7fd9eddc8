"""Choose the sources from which each node pulls the published version of the weights.

Owns the endpoints of all nodes, the sets of nodes that hold or pull the version, the message that
lists a node's sources, and the rule that chooses them. `fleet.py` sends these messages and changes
the states of nodes; weights/pull and weights/delta transfer the bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import filterfalse, islice

from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState
from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.messages.weights import (
    Canary,
    DeltaOffer,
    PublishWeights,
    WeightsBase,
    WeightsEndpoint,
    WeightsFailed,
    WeightsSource,
)
from lightrl.tickets import pull_tickets

MAX_PEERS = 16  # rollout nodes among the sources of one node, besides the trainer
# Pulling nodes that are notified of a node that begins to pull. With the message to that node, a
# fleet that joins at the same moment costs five messages a node.
MAX_UPDATES_PER_JOIN = 4
FEW_SOURCES = 2  # a node with fewer is sent more
MAX_CHAIN = 4  # most steps that a node may be behind to receive deltas
MAX_SHARE = 0.5  # largest size of a chain of deltas, as a share of the version

PULLING = {NodeState.LOADING, NodeState.UPDATING}


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The newest complete version of the weights."""

    policy_version: int
    digest: str
    # of its file, and of its manifest; 0 in a journal of a release that did not store them
    num_bytes: int = 0
    manifest_bytes: int = 0
    canary: Canary | None = None
    # of adapters; without sources
    base: WeightsBase | None = None

    @property
    def is_described(self) -> bool:
        """Whether sources can be sent; if not, the trainer publishes the version again first."""
        return self.manifest_bytes > 0


def version_of(message: PublishWeights) -> PublishedVersion:
    m = message
    sizes = m.num_bytes, m.manifest_bytes
    return PublishedVersion(m.policy_version, m.digest, *sizes, m.canary, m.base)


class WeightSources:
    def __init__(self, settings: Settings) -> None:
        self.endpoints: dict[str, WeightsEndpoint] = {}  # by node
        self.trainer: str | None = None  # which holds the published version
        # Rollout nodes with an endpoint: those that hold the version, and those that pull it.
        self.complete = PeerRing()
        self.partial = PeerRing()
        # pulling node -> the sources that it was sent, in any message
        self.assigned: dict[str, dict[str, None]] = {}
        self.waiting: dict[str, None] = {}  # nodes that need sources while there are none
        # (node, source) that sent it wrong bytes of the published version
        self.bad: set[tuple[str, str]] = set()
        self._published: PublishedVersion | None = None
        self._before = ""  # digest of the version before
        self._deltas = DeltaChain()
        self._has_deltas = settings.deltas

    # Versions

    def publish(self, published: PublishedVersion, deltas: Iterable[DeltaOffer] = ()) -> None:
        """Replace the published version and forget the assigned sources. A version that was
        trained again with another digest replaces the one that nodes hold."""
        before, self._published = self._published, published
        self._deltas.add(published.digest, deltas)
        self.assigned.clear()
        self.waiting.clear()
        is_next = before is None or before.policy_version != published.policy_version
        if before is None or is_next or before.digest != published.digest:
            self._before = before.digest if before is not None and is_next else ""
            self.complete.clear()
            self.bad.clear()

    def add_deltas(self, deltas: Iterable[DeltaOffer]) -> bool:
        """Add deltas to the published version. Returns whether one of them is new."""
        assert self._published is not None
        return self._deltas.add(self._published.digest, deltas)

    @property
    def policy_version(self) -> int | None:
        """The number of the published version."""
        return None if self._published is None else self._published.policy_version

    def can_use_delta(self, node: Node) -> bool:
        """Return whether the node can use a delta to the published version: it holds or pulls the
        version before, or one from which deltas lead to the version before."""
        published, at, before = self._published, self._start_of_deltas(node), self._before
        return (
            self._has_deltas
            and published is not None
            and bool(at)
            and (at == before or bool(self._deltas.between(at, before, published.num_bytes)))
        )

    def deltas_for(self, node: Node) -> tuple[DeltaOffer, ...]:
        """Return the deltas from the version that the node holds, or else pulls, to the published
        version."""
        published = self._published
        if published is None or not self._has_deltas:
            return ()
        at = self._start_of_deltas(node)
        return self._deltas.between(at, published.digest, published.num_bytes)

    def _start_of_deltas(self, node: Node) -> str:
        """Return the digest of the version that the node holds. Of a node that holds none, that of
        the older version which it pulled at its last heartbeat; "" if that is not known."""
        if node.base or node.weights is None or self._published is None:
            return node.base
        steps = self._published.policy_version - node.weights.policy_version
        return self._deltas.base_of(self._before, steps - 1) if steps > 0 else ""

    # Nodes

    def open_endpoint(self, node: Node, endpoint: WeightsEndpoint) -> list[str]:
        """Store the endpoint of a node. Returns the nodes to notify."""
        name, before = node.name, self.endpoints.get(node.name)
        if before == endpoint:
            return []
        self.endpoints[name] = endpoint
        self.update(node)
        if before is None:
            return self._subscribers(name)
        # tickets for the endpoint before are invalid
        holders = [n for n, sent in self.assigned.items() if sent.pop(name, self) is None]
        short = [n for n in holders if self.num_left(n) < FEW_SOURCES]
        return list(dict.fromkeys([*self._subscribers(name), *short]))

    def update(self, node: Node) -> None:
        """Update the sets of sources after a change of a node's state, version or endpoint."""
        published = self._published
        serves = node.name in self.endpoints and "rollout" in node.roles and published is not None
        has_newest = published is not None and node.policy_version == published.policy_version
        holds = has_newest and node.has_file
        may_hold = node.state not in {NodeState.JOINING, NodeState.GONE}
        self.complete.put(node.name, serves and holds and may_hold)
        pulls = self.is_pulling(node)
        self.partial.put(node.name, serves and not holds and pulls and not node.receives)
        if not pulls:
            self.assigned.pop(node.name, None)
        if not pulls and node.state is not NodeState.JOINING:
            self.waiting.pop(node.name, None)

    def serves_newest(self, node: Node) -> bool:
        """Return whether the engine serves the published version, or will once it wakes."""
        published = self._published
        has_it = published is not None and node.policy_version == published.policy_version
        return node.state is NodeState.READY or (has_it and node.is_asleep)

    def is_pulling(self, node: Node) -> bool:
        """Return whether the node pulls the published version or has to."""
        is_behind = node.state is NodeState.RELEASED and not self.serves_newest(node)
        return is_behind or node.state in PULLING

    def remove(self, name: str) -> None:
        """Remove a node that has gone."""
        self.endpoints.pop(name, None)
        self.complete.put(name, False)
        self.partial.put(name, False)
        self.assigned.pop(name, None)
        self.waiting.pop(name, None)
        self.bad = {pair for pair in self.bad if name not in pair}
        if name == self.trainer:
            self.trainer = None

    def report_bad_source(self, name: str, report: WeightsFailed) -> bool:
        """Exclude a source that sent this node wrong bytes, for this node and this version only.
        Other nodes keep the source: each verifies every bucket and drops bad sources itself.
        Returns whether the report is new, of the published version and of an assigned source."""
        pair, was_assigned = (name, report.source), report.source in self.assigned.get(name, ())
        is_current = report.policy_version == self.policy_version
        is_new = is_current and was_assigned and pair not in self.bad
        if is_new:
            self.bad.add(pair)
        return is_new

    # Which nodes are notified

    def _subscribers(self, name: str) -> list[str]:
        """Return the nodes to notify of this source: those that wait, and all pulling nodes if the
        source is the trainer, else the next few in the ring."""
        if name == self.trainer:
            return list(dict.fromkeys([*self.waiting, *self.assigned]))
        if name not in self.complete and name not in self.partial:
            return []
        names, pulling = dict.fromkeys(self.waiting), self.partial.names
        place = self.partial.place(name, 0)
        before = range(1, min(MAX_UPDATES_PER_JOIN, len(pulling)) + 1)
        names |= dict.fromkeys(pulling[place - step] for step in before)
        names.pop(name, None)
        return list(names)

    def nodes_with_few_sources(self, lost: str) -> list[str]:
        """Return nodes that were sent this lost source and have few others."""
        pulling = [n for n, sent in self.assigned.items() if lost in sent]
        return [n for n in pulling if self.num_left(n) < FEW_SOURCES]

    def num_left(self, name: str) -> int:
        """Return the number of sources that a node was sent and can still use."""
        return sum(
            n == self.trainer
            or ((n in self.complete or n in self.partial) and (name, n) not in self.bad)
            for n in self.assigned.get(name, ())
        )

    # What a node is sent

    def message_for(
        self, node: Node, only_news: bool = False, group: BroadcastGroup | None = None
    ) -> PublishWeights | None:
        """Return the message that lists the node's sources of the published version; None while
        there is no source, or with `only_news` if it lists no new one. `group`: the place of the
        node in a broadcast group, which delivers everything but the manifest."""
        published = self._published
        if published is None or not published.is_described:
            return None
        names = self._choose(node)
        sent = self.assigned.get(node.name, {})
        if only_news and all(n in sent for n in names):
            if not self.num_left(node.name):
                self.waiting[node.name] = None
            return None
        # pulling nodes without sources have nothing to serve
        is_there = self.trainer in self.endpoints or self.complete.names or self.assigned
        holds_it = node.name == self.trainer or node.name in self.complete
        self.waiting.pop(node.name, None)
        if not (names and is_there):
            self.waiting[node.name] = None
            if not holds_it:
                return None
        if not group:  # a member of a group pulls next to nothing
            self.assigned[node.name] = sent | dict.fromkeys(names)
        return PublishWeights(
            published.policy_version,
            published.digest,
            published.num_bytes,
            published.manifest_bytes,
            self._sources(names, node.name, published.policy_version),
            () if group else self.deltas_for(node),
            published.canary,
            group=group,
            base=self._base_for(names, node.name),
        )

    def _base_for(self, names: Sequence[str], receiver: str) -> WeightsBase | None:
        """Return the base of the adapters; every holder of the adapters also holds the base."""
        base = self._published.base if self._published is not None else None
        return replace(base, sources=self._sources(names, receiver, 0)) if base else None

    def _choose(self, node: Node) -> tuple[str, ...]:
        receiver, trainer = node.name, self.trainer
        if trainer not in self.endpoints or trainer == receiver:
            trainer = None

        others = {receiver, trainer}

        def is_excluded(name: str) -> bool:
            return name in others or (receiver, name) in self.bad

        index = self.partial.place(receiver, node.number)
        excluded = is_excluded if self.bad else others.__contains__
        return choose(index, self.complete.names, self.partial.names, trainer, excluded)

    def _sources(
        self, names: Sequence[str], receiver: str, policy_version: int
    ) -> tuple[WeightsSource, ...]:
        endpoints = [self.endpoints[name] for name in names]
        secrets = (endpoint.secret for endpoint in endpoints)
        tickets = pull_tickets(secrets, receiver, policy_version)
        addresses = (endpoint.addresses for endpoint in endpoints)
        return tuple(map(WeightsSource, names, addresses, tickets))


def choose(
    index: int,
    complete: Sequence[str],
    partial: Sequence[str],
    trainer: str | None,
    is_excluded: Callable[[str], bool],
) -> tuple[str, ...]:
    """Return sources in the order in which a node asks them: nodes that hold the whole version,
    nodes that pull it and serve verified buckets, the trainer. While the trainer is away, a holder
    of the whole version comes last instead, to spare it load that peers can take.

    `index` is the place of the asking node, in `partial` if listed there: each node starts at
    another place, so that no source is the first of all nodes. `is_excluded`: nodes that are no
    sources for the asking node, itself included; never the trainer.
    """
    holders = _take(complete, index, MAX_PEERS, is_excluded)
    others = _take(partial, index, MAX_PEERS - len(holders), is_excluded)
    if trainer is not None:
        return (*holders, *others, trainer)
    return (*holders[1:], *others, *holders[:1])


def _take(
    ring: Sequence[str], start: int, count: int, is_excluded: Callable[[str], bool]
) -> list[str]:
    size = len(ring)
    few = (ring[(start + step) % size] for step in _distances(size))
    taken = dict.fromkeys(islice(filterfalse(is_excluded, few), count))
    for step in range(size):
        if len(taken) >= count:
            break
        name = ring[(start + step) % size]
        if not is_excluded(name):
            taken[name] = None
    return list(taken)


@lru_cache(maxsize=4096)  # as many sizes as a growing fleet has
def _distances(size: int) -> tuple[int, ...]:
    """Return distances to the neighbours of a place in a ring of this size: few near, few far.

    With near neighbours alone a bucket would need size / MAX_PEERS relays to reach all nodes; with
    these distances it needs about log(size). Every place is the neighbour of as many places as it
    has neighbours.
    """
    if size <= MAX_PEERS:
        return ()
    return tuple(sorted({int(size ** (k / MAX_PEERS)) for k in range(MAX_PEERS)}))


class PeerRing:
    """A list of names with insertion and removal in constant time; removal reorders it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._places: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self.names)

    def place(self, name: str, default: int) -> int:
        return self._places.get(name, default)

    def put(self, name: str, is_member: bool) -> None:
        """Insert or remove a name."""
        place = self._places.get(name)
        if is_member and place is None:
            self._places[name] = len(self.names)
            self.names.append(name)
        elif not is_member and place is not None:
            del self._places[name]
            last = self.names.pop()
            if last != name:
                self.names[place] = last
                self._places[last] = place

    def clear(self) -> None:
        self.names.clear()
        self._places.clear()


class DeltaChain:
    """The deltas that the trainer has published to the newest MAX_CHAIN versions."""

    def __init__(self) -> None:
        self._leading_to: dict[str, DeltaOffer] = {}  # by the digest of the version, oldest first

    def add(self, version: str, deltas: Iterable[DeltaOffer]) -> bool:
        """Store the deltas that lead to this version and ignore others. Returns whether a stored
        one is new."""
        is_new = False
        for delta in deltas:
            if delta.target == version != delta.base:
                is_new |= self._leading_to.pop(version, None) != delta
                self._leading_to[version] = delta
        while len(self._leading_to) > MAX_CHAIN:
            del self._leading_to[next(iter(self._leading_to))]
        return is_new

    def base_of(self, version: str, steps: int) -> str:
        """Return the version from which so many deltas lead to this one; "" if one is missing."""
        for _ in range(steps):
            link = self._leading_to.get(version)
            version = link.base if link is not None else ""
        return version

    def between(self, base: str, version: str, num_bytes: int) -> tuple[DeltaOffer, ...]:
        """Return the chain from one version to another, oldest first; empty if a delta is missing
        or the chain is larger than MAX_SHARE of the whole version of `num_bytes`."""
        links: list[DeltaOffer] = []
        most = MAX_SHARE * num_bytes
        while version != base:
            link = self._leading_to.get(version)
            if link is None or len(links) == MAX_CHAIN:
                return ()
            most -= link.num_bytes + link.manifest_bytes
            if most < 0:
                return ()
            links.append(link)
            version = link.base
        return tuple(reversed(links))
