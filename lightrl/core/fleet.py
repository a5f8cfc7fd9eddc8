"""Who takes part, since when, and which version of the weights each node serves.

Owns nodes, leases and the offering of weights. Knows nothing of responses: whoever removes a node
decides what becomes of the work that it held.
"""

from itertools import islice
from statistics import fmean

from lightrl.core.commands import Admit, Command, Report, Send
from lightrl.core.speed import Speed
from lightrl.core.state import Node, NodeState, Published, Settings
from lightrl.messages import (
    PROTOCOL,
    Drain,
    Hello,
    PublishWeights,
    WeightsFailed,
    WeightsReady,
)

VERSIONS_REMEMBERED = 8  # beyond those that asynchronous mode allows: late chunks are told from forged ones
SPEED_SAMPLE = 16  # nodes from which the speed of a new one is guessed
SHARE_BATCH = 32  # responses at which the speeds of nodes are compared
MAX_WEIGHTS_FAILURES = 3  # of one version at one node, before the node is asked to leave


class Fleet:
    def __init__(self, settings: Settings) -> None:
        self.nodes: dict[str, Node] = {}
        self.ready: dict[str, Node] = {}  # those that serve the published version
        self.updating: dict[str, Node] = {}  # those that will serve it in a moment
        self.share_updating = 0.0  # of the work, of these
        self.share_ready = 0.0  # of those that serve it already
        self.trainer: str | None = None
        self.published: Published | None = None
        self.digests: dict[int, str] = {}  # of the newest versions
        self.num_joined = 0
        self.num_weights_failed = 0
        self.lease_check_at: float | None = None
        self._settings = settings

    # Membership

    def why_refused(self, hello: Hello) -> str | None:
        """In one line, or None if the node may take part."""
        if hello.protocol != PROTOCOL:
            return f"speaks protocol {hello.protocol}, this run {PROTOCOL}"
        if hello.slots < 0 or not hello.roles:
            return f"offers {hello.slots} slots and {len(hello.roles)} roles"
        others = (n for n in self.nodes.values() if n.name != hello.node)
        if "trainer" in hello.roles and any("trainer" in n.roles for n in others):
            return "this run has a trainer node already"
        return None

    def is_ghost(self, hello: Hello) -> bool:
        """News of an older process of a node that has been started again since."""
        known = self.nodes.get(hello.node)
        return known is not None and known.incarnation > hello.incarnation

    def add(self, hello: Hello, now: float) -> list[Command]:
        """Takes a node in, or once more if it is known; an older incarnation must have been removed."""
        known = self.nodes.get(hello.node)
        if known is not None:
            known.heard_at = now
            return [Admit(hello.node)]
        node = Node(
            name=hello.node,
            incarnation=hello.incarnation,
            roles=hello.roles,
            slots=hello.slots or self._settings.slots,
            heard_at=now,
            pid=hello.pid,
            host=hello.host,
            speed=self._typical_speed(),
        )
        self.nodes[node.name] = node
        if "trainer" in node.roles:
            self.trainer = node.name
        self.num_joined += 1
        if self.lease_check_at is None:
            self.lease_check_at = now + self._settings.lease_s
        return [
            Admit(node.name),
            Report(f"{node.name} joined as {', '.join(node.roles)}"),
            *self._offer(node),
        ]

    def _typical_speed(self) -> Speed:
        """What to expect of a node not heard of yet: the mean of some that were."""
        known = [n.speed for n in islice(self.ready.values(), SPEED_SAMPLE) if n.speed.num_observed]
        if not known:
            return Speed()
        return Speed(fmean(s.base for s in known), fmean(s.slope for s in known))

    def remove(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is not None:
            self._move(node, NodeState.GONE)
            if name == self.trainer:
                self.trainer = None

    def drain(self, node: Node) -> None:
        """It takes no more work."""
        self._move(node, NodeState.DRAINING)

    def _move(self, node: Node, to: NodeState) -> None:
        """Keeps the views of `nodes` true. For a node that has only just joined nothing is reserved."""
        node.move(to)
        if self.ready.pop(node.name, None) is not None:
            self.share_ready = self.share_ready - node.share if self.ready else 0.0
        if self.updating.pop(node.name, None) is not None:
            self.share_updating = self.share_updating - node.share if self.updating else 0.0
        if to is NodeState.UPDATING:
            node.share = 1.0 / node.speed.step_s(SHARE_BATCH)
            self.updating[node.name] = node
            self.share_updating += node.share
        elif to is NodeState.READY and "rollout" in node.roles:
            node.share = 1.0 / node.speed.step_s(SHARE_BATCH)
            self.ready[node.name] = node
            self.share_ready += node.share

    def expired(self, now: float) -> list[Node]:
        """Nodes whose lease has run out; sets the time of the next check.

        Looking at all nodes only when the oldest lease may have run out keeps heartbeats O(1).
        """
        lease = self._settings.lease_s
        gone = [n for n in self.nodes.values() if now - n.heard_at >= lease]
        heard = [n.heard_at for n in self.nodes.values() if now - n.heard_at < lease]
        self.lease_check_at = min(heard) + lease if heard else None
        return gone

    # Weights

    def publish(self, name: str, message: PublishWeights, expected: int) -> list[Command]:
        """A complete version appeared at the trainer; every rollout node is told where to pull it."""
        node = self.nodes.get(name)
        version = message.manifest.policy_version
        if node is None or "trainer" not in node.roles or version != expected:
            return [Report(f"{name} published version {version}, expected {expected}: ignored")]
        self.published = Published(message)
        self.digests[version] = message.manifest.digest
        self.digests.pop(version - self._settings.max_staleness - VERSIONS_REMEMBERED, None)
        if node.state is NodeState.JOINING and "rollout" not in node.roles:
            self._move(node, NodeState.READY)
        commands: list[Command] = []
        for other in self.nodes.values():
            other.weights_failures = 0
            commands += self._offer(other)
        return commands

    def _offer(self, node: Node) -> list[Command]:
        if self.published is None or "rollout" not in node.roles or node.state is NodeState.DRAINING:
            return []
        if node.state is NodeState.JOINING:
            self._move(node, NodeState.LOADING)
        elif node.state is NodeState.READY:
            self._move(node, NodeState.UPDATING)
        return [Send(node.name, self.published.message)]

    def confirm(self, name: str, ready: WeightsReady) -> list[Command]:
        """A node's engine has loaded a version; the node is ready only if the digests agree."""
        node, published = self.nodes.get(name), self.published
        if node is None or published is None or node.state not in {NodeState.LOADING, NodeState.UPDATING}:
            return []
        if ready.policy_version != published.policy_version:
            return []  # the newer one is on its way
        if ready.digest != published.digest:
            reason = f"digest {ready.digest} is not the published {published.digest}"
            return self.refuse(name, WeightsFailed(ready.policy_version, reason))
        node.policy_version = ready.policy_version
        self._move(node, NodeState.READY)
        return []

    def refuse(self, name: str, failed: WeightsFailed) -> list[Command]:
        """A node does not serve the published version: again, and after MAX_WEIGHTS_FAILURES it must go.

        If it was ready, its engine has died; the caller has taken its responses away.
        """
        node, published = self.nodes.get(name), self.published
        if node is None or published is None or failed.policy_version != published.policy_version:
            return []
        if node.state is NodeState.DRAINING:
            return []
        if node.state is NodeState.READY:
            self._move(node, NodeState.UPDATING)
        self.num_weights_failed += 1
        node.weights_failures += 1
        report = Report(f"{name}: version {failed.policy_version} failed: {failed.reason}")
        if node.weights_failures < MAX_WEIGHTS_FAILURES:
            return [report, Send(name, published.message)]
        return [report, Send(name, Drain(name, f"cannot load version {failed.policy_version}"))]
