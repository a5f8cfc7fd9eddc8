"""Where the published version of the weights is to be had, and what each node was told of it.

Owns the endpoints of all nodes, which of them hold the version or are at it, and the message that
tells a node so. Who it is assigned to as a source: `sources.py`. Moves no node and sends nothing;
`fleet.py` does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightrl.core.delta_chain import DeltaChain
from lightrl.core.settings import Settings
from lightrl.core.sources import Ring, choose
from lightrl.core.state import Node, NodeState
from lightrl.messages.weights import (
    BadSource,
    Canary,
    DeltaOffer,
    PublishWeights,
    WeightsBase,
    WeightsEndpoint,
    WeightsSource,
)
from lightrl.tickets import pull_tickets

# nodes that still pull and are told of one that begins to: with the message to that one itself, a
# fleet that joins together costs five messages a node
TOLD_OF_EACH = 4
FEW = 2  # sources that are left: less, and a node is told of others

PULLING = {NodeState.LOADING, NodeState.UPDATING}


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The newest complete version of the weights."""

    policy_version: int
    digest: str
    # of its file, and of its manifest; 0 in a journal of a release that did not write them down
    num_bytes: int = 0
    manifest_bytes: int = 0
    canary: Canary | None = None
    # of adapters; without sources
    base: WeightsBase | None = None

    @property
    def is_described(self) -> bool:
        """Whether nodes can be told of it; else the trainer says it again when it is back."""
        return self.manifest_bytes > 0


def version_of(message: PublishWeights) -> PublishedVersion:
    m = message
    sizes = m.num_bytes, m.manifest_bytes
    return PublishedVersion(m.policy_version, m.digest, *sizes, m.canary, m.base)


class Offers:
    def __init__(self, settings: Settings) -> None:
        self.endpoints: dict[str, WeightsEndpoint] = {}  # by node
        self.trainer: str | None = None  # which holds the published version
        self.whole = Ring()  # rollout nodes with an endpoint that hold it,
        self.partial = Ring()  # and those that are at it
        # node that is at it -> the sources that it was told of, in any message
        self.told: dict[str, dict[str, None]] = {}
        self.waiting: dict[str, None] = {}  # nodes that were to be told, and there was no source
        # (node, source) that sent it wrong bytes of the published version
        self.bad: set[tuple[str, str]] = set()
        self._published: PublishedVersion | None = None
        self._before = ""  # digest of the version before
        self._deltas = DeltaChain()
        self._has_deltas = settings.deltas

    # What is there

    def begin(self, published: PublishedVersion, deltas: Iterable[DeltaOffer] = ()) -> None:
        """A version is published, or published again: no node has an offer of it yet. One that was
        trained again with another digest replaces the one that nodes hold."""
        before, self._published = self._published, published
        self._deltas.add(published.digest, deltas)
        self.told.clear()
        self.waiting.clear()
        is_next = before is None or before.policy_version != published.policy_version
        if before is None or is_next or before.digest != published.digest:
            self._before = before.digest if before is not None and is_next else ""
            self.whole.clear()
            self.bad.clear()

    def add_deltas(self, deltas: Iterable[DeltaOffer]) -> bool:
        """Of the published version, after it was; whether one of them is news."""
        assert self._published is not None
        return self._deltas.add(self._published.digest, deltas)

    @property
    def policy_version(self) -> int | None:
        """The published one."""
        return None if self._published is None else self._published.policy_version

    def can_go_on(self, node: Node) -> bool:
        """Whether this node has the version before the published one, or is at it: a difference
        between the two would be of use to it."""
        published, at, before = self._published, node.base, self._before
        return (
            self._has_deltas
            and published is not None
            and bool(at)
            and (at == before or bool(self._deltas.between(at, before, published.num_bytes)))
        )

    def has_deltas_for(self, node: Node) -> bool:
        published = self._published
        return (
            self._has_deltas
            and published is not None
            and bool(self._deltas.between(node.base, published.digest, published.num_bytes))
        )

    def open(self, node: Node, endpoint: WeightsEndpoint) -> list[str]:
        """A node serves there from now on; returns whom to tell, if it is news to them."""
        name, before = node.name, self.endpoints.get(node.name)
        if before == endpoint:
            return []
        self.endpoints[name] = endpoint
        self.place(node)
        if before is None:
            return self._hearers(name)
        # tickets for the one before are worth nothing
        holders = [n for n, told in self.told.items() if told.pop(name, self) is None]
        short = [n for n in holders if self.num_left(n) < FEW]
        return list(dict.fromkeys([*self._hearers(name), *short]))

    def place(self, node: Node) -> None:
        """After all that changes what a node holds: its state, its version, its endpoint."""
        published = self._published
        serves = node.name in self.endpoints and "rollout" in node.roles and published is not None
        has_newest = published is not None and node.policy_version == published.policy_version
        holds = has_newest and node.has_file
        may_hold = node.state not in {NodeState.JOINING, NodeState.GONE}
        self.whole.put(node.name, serves and holds and may_hold)
        pulls = self.pulls(node)
        self.partial.put(node.name, serves and not holds and pulls and not node.receives)
        if not pulls:
            self.told.pop(node.name, None)
        if not pulls and node.state is not NodeState.JOINING:
            self.waiting.pop(node.name, None)

    def serves_newest(self, node: Node) -> bool:
        """It has the published version, and says so; one that sleeps serves it once it wakes."""
        published = self._published
        has_it = published is not None and node.policy_version == published.policy_version
        return node.state is NodeState.READY or (has_it and node.is_asleep)

    def pulls(self, node: Node) -> bool:
        """It is at the published version, or must be told where to get it."""
        is_behind = node.state is NodeState.RELEASED and not self.serves_newest(node)
        return is_behind or node.state in PULLING

    def forget(self, name: str) -> None:
        """This node has gone."""
        self.endpoints.pop(name, None)
        self.whole.put(name, False)
        self.partial.put(name, False)
        self.told.pop(name, None)
        self.waiting.pop(name, None)
        if name == self.trainer:
            self.trainer = None

    # Who is to be told

    def _hearers(self, name: str) -> list[str]:
        """Whom to tell of this node, which serves from now on: those who wait; if it is the
        trainer, all, else the next few of those who are at it."""
        if name == self.trainer:
            return list(dict.fromkeys([*self.waiting, *self.told]))
        if name not in self.whole and name not in self.partial:
            return []
        names, pulling = dict.fromkeys(self.waiting), self.partial.names
        place = self.partial.place(name, 0)
        before = range(1, min(TOLD_OF_EACH, len(pulling)) + 1)
        names |= dict.fromkeys(pulling[place - step] for step in before)
        names.pop(name, None)
        return list(names)

    def short_of(self, name: str) -> list[str]:
        """Nodes that were told of this one, which serves no more, and have few others."""
        pulling = [n for n, told in self.told.items() if name in told]
        return [n for n in pulling if self.num_left(n) < FEW]

    def num_left(self, name: str) -> int:
        """Sources that this node was told of, as far as it can still use them."""
        return sum(
            n == self.trainer
            or ((n in self.whole or n in self.partial) and (name, n) not in self.bad)
            for n in self.told.get(name, ())
        )

    # What it is told

    def message_for(
        self, node: Node, only_news: bool = False, group: str = ""
    ) -> PublishWeights | None:
        """What to tell a node that shall have the published version; None while there is no source.
        `only_news`: nor if it was told of all of them. `group`: by which it gets all of it but the
        manifest."""
        published = self._published
        if published is None or not published.is_described:
            return None
        names = self._choose(node)
        told = self.told.get(node.name, {})
        if only_news and all(n in told for n in names):
            if not self.num_left(node.name):
                self.waiting[node.name] = None
            return None
        # what nobody was told of, those who are at it do not have
        is_there = self.trainer in self.endpoints or self.whole.names or self.told
        holds_it = node.name == self.trainer or node.name in self.whole
        self.waiting.pop(node.name, None)
        if not (names and is_there):
            self.waiting[node.name] = None
            if not holds_it:
                return None
        if not group:  # who is told of a group, pulls next to nothing
            self.told[node.name] = told | dict.fromkeys(names)
        return PublishWeights(
            published.policy_version,
            published.digest,
            published.num_bytes,
            published.manifest_bytes,
            self._sources(names, node.name, published.policy_version),
            () if group else self._deltas_for(node),
            published.canary,
            group=group,
            base=self._base_for(names, node.name),
        )

    def _base_for(self, names: Sequence[str], receiver: str) -> WeightsBase | None:
        """Who has adapters has what they are beside, and who is at them is at that, too."""
        base = self._published.base if self._published is not None else None
        return replace(base, sources=self._sources(names, receiver, 0)) if base else None

    def _choose(self, node: Node) -> tuple[str, ...]:
        receiver, trainer = node.name, self.trainer
        if trainer not in self.endpoints or trainer == receiver:
            trainer = None

        others = {receiver, trainer}

        def is_barred(name: str) -> bool:
            return name in others or (receiver, name) in self.bad

        index = self.partial.place(receiver, node.number)
        barred = is_barred if self.bad else others.__contains__
        return choose(index, self.whole.names, self.partial.names, trainer, barred)

    def _sources(
        self, names: Sequence[str], receiver: str, policy_version: int
    ) -> tuple[WeightsSource, ...]:
        endpoints = [self.endpoints[name] for name in names]
        secrets = (endpoint.secret for endpoint in endpoints)
        tickets = pull_tickets(secrets, receiver, policy_version)
        addresses = (endpoint.addresses for endpoint in endpoints)
        return tuple(map(WeightsSource, names, addresses, tickets))

    def _deltas_for(self, node: Node) -> tuple[DeltaOffer, ...]:
        """From the version that it holds; or, if it holds none, from the one that it began to
        pull: that is the one before, as long as the difference to it may yet be found."""
        published = self._published
        assert published is not None
        if not self._has_deltas:
            return ()
        links = self._deltas.between(node.base, published.digest, published.num_bytes)
        if not links and node.policy_version is None:
            node.base = self._before if self.can_go_on(node) else published.digest
        return links

    def report(self, name: str, report: BadSource) -> bool:
        """A source sent this node wrong bytes: the node is not sent to it again for this version.
        Other nodes are: each proves every bucket and drops the source itself. Returns whether the
        report is new, of the published version and of a source that the node was sent to."""
        pair, was_told = (name, report.node), report.node in self.told.get(name, ())
        is_new = report.policy_version == self.policy_version and was_told and pair not in self.bad
        if is_new:
            self.bad.add(pair)
        return is_new
