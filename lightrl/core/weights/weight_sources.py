"""Choose the sources from which each node pulls the published version of the weights.

Owns the endpoints of all nodes, the nodes that hold or pull the version, the message that lists a
node's sources, and the rule that chooses them. A node is sent sources when it has to pull, and
again when none of them is left, or when one of the next nodes begins to pull. `fleet.py` sends
these messages and changes the states of nodes; weights/pull and weights/delta transfer the bytes.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState
from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.messages.weights import (
    DeltaOffer,
    PublishWeights,
    WeightsEndpoint,
    WeightsFailed,
    WeightsSource,
)
from lightrl.tickets import pull_tickets

MAX_PEERS = 16  # rollout nodes among the sources of one node, besides the trainer
# Pulling nodes that are notified of a node that begins to pull. With the message to that node, a
# fleet that joins at the same moment costs five messages a node.
MAX_UPDATES_PER_JOIN = 4
MAX_CHAIN = 4  # most steps that a node may be behind to receive deltas
MAX_SHARE = 0.5  # largest size of a chain of deltas, as a share of the version

PULLING = {NodeState.LOADING, NodeState.UPDATING}


class WeightSources:
    """Chooses the sources from which each node pulls the published version. Owns the endpoints of
    nodes, the nodes that hold or pull the version, and the sources that each one was sent."""

    def __init__(self, settings: Settings) -> None:
        self.endpoints: dict[str, WeightsEndpoint] = {}  # by node
        self.trainer: str | None = None  # which holds the published version
        # Rollout nodes with an endpoint: those that hold the version, and those that pull it.
        self.complete: dict[str, None] = {}
        self.partial: dict[str, None] = {}
        # node that needs the version -> the sources that it was sent and can still use
        self.assigned: dict[str, set[str]] = {}
        # the trainer's message; its sizes are 0 if the journal is of a release without them
        self._published: PublishWeights | None = None
        self._before = ""  # digest of the version before
        # the newest MAX_CHAIN, by the digest of the version to which each leads; oldest first
        self._deltas: dict[str, DeltaOffer] = {}
        self._has_deltas = settings.deltas

    # Versions

    def publish(self, published: PublishWeights) -> None:
        """Replace the published version and forget the assigned sources. A version that was
        trained again with another digest replaces the one that nodes hold."""
        before, self._published = self._published, published
        self.add_deltas(published.deltas)
        self.assigned.clear()
        is_next = before is None or before.policy_version != published.policy_version
        if before is None or is_next or before.digest != published.digest:
            self._before = before.digest if before is not None and is_next else ""
            self.complete.clear()

    def add_deltas(self, deltas: Iterable[DeltaOffer]) -> bool:
        """Store the deltas that lead to the published version. Returns whether one is new."""
        assert self._published is not None
        known = dict(self._deltas)
        for delta in deltas:
            if delta.target == self._published.digest != delta.base:
                self._deltas.pop(delta.target, None)
                self._deltas[delta.target] = delta
        while len(self._deltas) > MAX_CHAIN:
            del self._deltas[next(iter(self._deltas))]
        return self._deltas != known

    @property
    def policy_version(self) -> int | None:
        """The number of the published version."""
        return None if self._published is None else self._published.policy_version

    def can_use_delta(self, node: Node) -> bool:
        """Return whether the node can use a delta to the published version: it holds or pulls the
        version before, or one from which deltas lead to the version before."""
        at, before = self._start_of_deltas(node), self._before
        return self._has_deltas and bool(at) and (at == before or bool(self._chain(at, before)))

    def deltas_for(self, node: Node) -> tuple[DeltaOffer, ...]:
        """Return the deltas from the version that the node holds, or else pulls, to the published
        version."""
        published = self._published
        return self._chain(self._start_of_deltas(node), published.digest) if published else ()

    def _start_of_deltas(self, node: Node) -> str:
        """Return the digest of the version that the node holds. Of a node that holds none, that of
        the older version which it pulled at its last heartbeat; "" if that is not known."""
        if node.base or node.weights is None or self._published is None:
            return node.base
        steps = self._published.policy_version - node.weights.policy_version
        if steps <= 0:
            return ""
        version = self._before
        for _ in range(steps - 1):
            version = self._deltas[version].base if version in self._deltas else ""
        return version

    def _chain(self, base: str, version: str) -> tuple[DeltaOffer, ...]:
        if self._published is None or not self._has_deltas or not base:
            return ()
        return delta_chain(self._deltas, base, version, MAX_SHARE * self._published.num_bytes)

    # Nodes

    @property
    def waiting(self) -> list[str]:
        """Nodes that need the version and have no source."""
        return [name for name, sources in self.assigned.items() if not sources]

    def open_endpoint(self, node: Node, endpoint: WeightsEndpoint) -> list[str]:
        """Store the endpoint of a node. Returns the nodes to notify: those without a source and the
        last few that began to pull; all that pull, if the node is the trainer. Tickets for the
        endpoint before are invalid."""
        before = self.endpoints.get(node.name)
        if before == endpoint:
            return []
        self.endpoints[node.name] = endpoint
        self.update(node)
        if node.name == self.trainer:
            return [name for name in self.assigned if name != node.name]
        if before is not None:
            self._withdraw(node.name)
            return self.waiting
        is_source = node.name in self.complete or node.name in self.partial
        others = [name for name in self.partial if name != node.name] if is_source else []
        return list(dict.fromkeys([*self.waiting, *others[-MAX_UPDATES_PER_JOIN:]]))

    def update(self, node: Node) -> None:
        """Update the lists of sources after a change of a node's state, version or endpoint."""
        name, published = node.name, self._published
        was_source = name in self.complete or name in self.partial
        serves = name in self.endpoints and "rollout" in node.roles and published is not None
        has_newest = published is not None and node.policy_version == published.policy_version
        holds, pulls = has_newest and node.has_file, self.is_pulling(node)
        is_joining = node.state is NodeState.JOINING
        may_hold = not is_joining and node.state is not NodeState.GONE
        _put(self.complete, name, serves and holds and may_hold)
        _put(self.partial, name, serves and not holds and pulls and not node.receives)
        if was_source and name not in self.complete and name not in self.partial:
            self._withdraw(name)
        if not pulls and not is_joining:
            self.assigned.pop(name, None)

    def _withdraw(self, name: str) -> None:
        """Remove a source from those that nodes were sent."""
        for sources in self.assigned.values() if name != self.trainer else ():
            sources.discard(name)

    def withdraw_trainer(self) -> None:
        """Handle a trainer that does not hold the published version any more."""
        name, self.trainer = self.trainer, None
        if name is not None and name not in self.complete:
            self._withdraw(name)

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
        if name == self.trainer:
            self.trainer = None
        self.endpoints.pop(name, None)
        _put(self.complete, name, False)
        _put(self.partial, name, False)
        self.assigned.pop(name, None)
        self._withdraw(name)

    def withdraw_bad(self, name: str, report: WeightsFailed) -> bool:
        """Withdraw a source that sent this node wrong bytes. Return whether it was one of the
        sources of the published version that the node was sent; others verify every bucket, too."""
        sources = self.assigned.get(name, set())
        was_sent = report.policy_version == self.policy_version and report.source in sources
        if was_sent:
            sources.discard(report.source)
        return was_sent

    # What a node is sent

    def message_for(
        self, node: Node, only_news: bool = False, group: BroadcastGroup | None = None
    ) -> PublishWeights | None:
        """Return the message that lists the node's sources of the published version; None while
        there is no source, unless the node has all of it and it is not `only_news`. `group`: the
        place of the node in a broadcast group, which delivers everything but the manifest."""
        published, name = self._published, node.name
        if published is None or not published.manifest_bytes:
            return None  # the trainer publishes the version again first
        sources = self._choose(node)
        # pulling nodes without sources have nothing to serve
        is_there = self.trainer in self.endpoints or self.complete or any(self.assigned.values())
        if not is_there:
            sources = ()
        if not group:  # a member of a group pulls next to nothing
            self.assigned.setdefault(name, set()).update(sources)
        has_it = name == self.trainer or name in self.complete
        if not sources and (only_news or not has_it):
            return None
        number, base = published.policy_version, published.base
        return PublishWeights(
            number,
            published.digest,
            published.num_bytes,
            published.manifest_bytes,
            self._sources(sources, name, number),
            () if group else self.deltas_for(node),
            published.canary,
            group=group,
            # of adapters; every holder of the adapters also holds the base
            base=replace(base, sources=self._sources(sources, name, 0)) if base else None,
        )

    def _choose(self, node: Node) -> tuple[str, ...]:
        receiver, pulling = node.name, list(self.partial)
        has_trainer = self.trainer in self.endpoints and self.trainer != receiver
        trainer = self.trainer if has_trainer else None
        index = pulling.index(receiver) if receiver in self.partial else node.number
        return choose(index, list(self.complete), pulling, trainer, {receiver, trainer})

    def _sources(
        self, names: Sequence[str], receiver: str, policy_version: int
    ) -> tuple[WeightsSource, ...]:
        endpoints = [self.endpoints[name] for name in names]
        secrets = (endpoint.secret for endpoint in endpoints)
        tickets = pull_tickets(secrets, receiver, policy_version)
        addresses = (endpoint.addresses for endpoint in endpoints)
        return tuple(map(WeightsSource, names, addresses, tickets))


def _put(names: dict[str, None], name: str, is_member: bool) -> None:
    if is_member:
        names[name] = None
    else:
        names.pop(name, None)


def choose(
    index: int,
    complete: Sequence[str],
    partial: Sequence[str],
    trainer: str | None,
    excluded: Container[str | None],
) -> tuple[str, ...]:
    """Return sources in the order in which a node asks them: nodes that hold the whole version,
    nodes that pull it and serve verified buckets, the trainer. While the trainer is away, a holder
    of the whole version comes last instead, to spare it load that peers can take.

    `index` is the place of the asking node, in `partial` if listed there: each node starts at
    another place, so that no source is the first of all nodes. `excluded`: no sources for the
    asking node, itself included.
    """
    holders = _take(complete, index, MAX_PEERS, excluded)
    others = _take(partial, index, MAX_PEERS - len(holders), excluded)
    if trainer is not None:
        return (*holders, *others, trainer)
    return (*holders[1:], *others, *holders[:1])


def _take(
    ring: Sequence[str], start: int, count: int, excluded: Container[str | None]
) -> list[str]:
    """Return the neighbours of a place in a ring: few near and few far, then the next ones.

    With near neighbours alone a bucket would need size / MAX_PEERS relays to reach all nodes; with
    these distances it needs about log(size). Every place is the neighbour of as many places as it
    has neighbours.
    """
    size, taken = len(ring), dict[str, None]()
    few = sorted({int(size ** (k / MAX_PEERS)) for k in range(MAX_PEERS)})
    for step in (*(few if size > MAX_PEERS else ()), *range(size)):
        if len(taken) >= count:
            break
        if (name := ring[(start + step) % size]) not in excluded:
            taken[name] = None
    return list(taken)


def delta_chain(
    deltas: dict[str, DeltaOffer], base: str, version: str, max_bytes: float
) -> tuple[DeltaOffer, ...]:
    """Return the chain from one version to another, oldest first; empty if one of the `deltas`, by
    the version to which each leads, is missing or the chain is larger than `max_bytes`."""
    links: list[DeltaOffer] = []
    while version != base:
        link = deltas.get(version)
        if link is None or len(links) == MAX_CHAIN:
            return ()
        max_bytes -= link.num_bytes + link.manifest_bytes
        if max_bytes < 0:
            return ()
        links.append(link)
        version = link.base
    return tuple(reversed(links))
