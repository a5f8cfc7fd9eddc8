"""Nodes of the run: membership, leases, and the version of the weights that each one serves.

Owns nodes and when a node is sent a version. `weight_sources.py` chooses the sources that it pulls
from, `broadcasts.py` the groups that receive together. Independent of responses: the caller that
removes a node requeues its work.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain, islice

from lightrl.core.commands import Admit, Outbox
from lightrl.core.nodes.speed import Speed
from lightrl.core.settings import Settings
from lightrl.core.sharing.shared_devices import SharedDevices, way_to_side, why_not_shared
from lightrl.core.state import RESTING, Node, NodeState
from lightrl.core.training.trainers import Trainers
from lightrl.core.weights.broadcasts import Broadcasts
from lightrl.core.weights.weight_sources import PULLING, WeightSources
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.nodes import PROTOCOL, Drain, Heartbeat, Hello
from lightrl.messages.weights import (
    Canary,
    PublishWeights,
    WeightsEndpoint,
    WeightsFailed,
    WeightsReady,
)

# Digests kept beyond those of asynchronous mode: a late chunk must not count as forged.
VERSIONS_REMEMBERED = 8
SPEED_SAMPLE = 16  # nodes from which the speed of a new one is estimated
SHARE_BATCH = 32  # responses at which the speeds of nodes are compared
MAX_WEIGHTS_FAILURES = 3  # of one version at one node, before the node is drained
MAX_STALE_OF_NODE = 16  # incarnations of one node, the newest: at most these may be alive
MAX_STALE_NODES = 4096  # the nodes that were restarted last: a run has fewer


class Fleet:
    """Owns the nodes of the run, their states and their leases. Decides which nodes are admitted,
    when a node is sent the newest version, and when one that cannot load it is drained."""

    def __init__(self, settings: Settings, outbox: Outbox) -> None:
        self.nodes: dict[str, Node] = {}
        self.ready: dict[str, Node] = {}  # those that serve the published version
        self.updating: dict[str, Node] = {}  # those that load it
        self.environments: dict[str, Node] = {}  # those with the role
        self.share_updating = 0.0  # of the work, of these
        self.share_ready = 0.0  # of those that serve it already
        self.trainers = Trainers(settings.num_trainers, outbox)
        self.devices = SharedDevices(settings.device_parts, self.trainers)
        self.now = 0.0  # of the current event
        self.published: PublishWeights | None = None  # as the trainer sent it
        self.sources = WeightSources(settings)
        self.broadcasts = Broadcasts(settings, self.nodes, self.sources, outbox)
        # Of the newest versions. The last one is current; those before it were replaced by versions
        # trained again, and tokens sampled under them may still arrive.
        self.digests: dict[int, tuple[str, ...]] = {}
        self.canaries: dict[int, Canary] = {}  # of these versions
        self.num_joined = 0
        self.num_preemptible = 0  # of `nodes`
        self.stale = StaleIncarnations()
        self.failed: dict[str, str] = {}  # rollout nodes that will not return: reason
        self._rollouts: set[str] = set()  # names of all that ever took part
        self.num_weights_failed = 0
        self.num_bad_sources = 0  # reports that a node sent another one wrong bytes
        self.lease_check_at: float | None = None
        self._settings = settings
        self._outbox = outbox

    @property
    def trainer(self) -> str | None:
        """The trainer node that leads; its messages are those of the trainer."""
        return self.trainers.leader

    # Membership

    def why_refused(self, hello: Hello) -> str | None:
        """Return why the node is refused, in one line; None if it is admitted."""
        if hello.protocol != PROTOCOL:
            return f"speaks protocol {hello.protocol}, this run {PROTOCOL}"
        if hello.slots < 0 or not hello.roles:
            return f"offers {hello.slots} slots and {len(hello.roles)} roles"
        if "environment" in hello.roles and self._settings.episodes is None:
            return "this run has no environment"
        if (reason := why_not_shared(hello, self.trainers, self._settings)) is not None:
            return reason
        return self.trainers.why_refused(hello) if "trainer" in hello.roles else None

    def add(self, hello: Hello, now: float) -> None:
        """Admit a node, or a known one again. Another incarnation must have been removed before."""
        known = self.nodes.get(hello.node)
        if known is not None:
            known.heard_at = now
            self._outbox.add(Admit(hello.node))
            again = "joined again"
            if "trainer" in known.roles:
                self.trainers.on_hello(hello)
            if hello.node == self.trainer:
                owed = self.broadcasts.lost(hello.node, True, again)
            else:
                owed = self.broadcasts.refused(hello.node, again)
            self._send_sources_to(owed, but=known)
            self._apply_hello(known, hello)
            return
        node = Node(
            name=hello.node,
            incarnation=hello.incarnation,
            roles=hello.roles,
            slots=hello.slots or self._default_slots(hello),
            heard_at=now,
            pid=hello.pid,
            host=hello.host,
            joined_at=now,
            speed=self._typical_speed(),
            number=self.num_joined,
            shares=hello.shares if "rollout" in hello.roles else "",
            part=hello.part,
            parallel=hello.parallel if "rollout" in hello.roles else 0,
            since=now,
        )
        self.nodes[node.name] = node
        self.devices.state_changed(node)
        if "trainer" in node.roles:
            self.trainers.on_hello(hello)
        self.num_joined += 1
        if "rollout" in node.roles:
            self._rollouts.add(node.name)
            self.failed.pop(node.name, None)
        if "environment" in node.roles:
            self.environments[node.name] = node
            self._transition(node, NodeState.READY)
        if self.lease_check_at is None:
            self.lease_check_at = now + self._settings.lease_s
        self._outbox.add(Admit(node.name))
        self._outbox.report(f"{node.name} joined as {', '.join(node.roles)}")
        self._apply_hello(node, hello)

    def _apply_hello(self, node: Node, hello: Hello) -> None:
        """Store what a hello reports, and send the node the newest version unless it serves it."""
        self.num_preemptible += hello.is_preemptible - node.is_preemptible
        node.is_preemptible = hello.is_preemptible
        if hello.serves is not None:
            node.base = hello.serves[1] if hello.has_file else ""
        if node.takes_turns and node.state is not NodeState.DRAINING:
            for state in way_to_side(node.state, hello.is_released):
                self._transition(node, state)
        self._send_newest_unless_served(node, hello)

    def _send_newest_unless_served(self, node: Node, hello: Hello) -> None:
        """Send a node that joins or returns the newest version, unless it serves it. A wrong report
        of a hello is detected: each chunk repeats the digest."""
        published = self.published
        if "rollout" not in node.roles or published is None or node.state is NodeState.DRAINING:
            return
        if hello.serves == (published.policy_version, published.digest):
            node.policy_version = published.policy_version
            if node.state not in {NodeState.READY, NodeState.RELEASING, NodeState.RELEASED}:
                self._transition(node, NodeState.READY)
            self.sources.update(node)
            self._send_new_sources(self.sources.waiting)
        else:
            self._send_sources(node)

    def on_heartbeat(self, name: str, heartbeat: Heartbeat, now: float) -> None:
        if (node := self.nodes.get(name)) is not None:
            node.heard_at, node.load, node.weights = now, heartbeat.load, heartbeat.weights
            node.loop_lag_ms, node.device = heartbeat.loop_lag_ms, heartbeat.device
            node.reported_at = now
            node.num_workers, node.is_saving = heartbeat.num_workers, heartbeat.is_saving

    def _default_slots(self, hello: Hello) -> int:
        episodes = self._settings.episodes
        if episodes is not None and "environment" in hello.roles:
            return episodes.slots
        return self._settings.slots_of(hello.parallel)

    def _typical_speed(self) -> Speed:
        """Return the mean speed of some nodes, expected of a new one. Between two steps nodes load
        or sleep."""
        there = (self.ready, self.updating, self.devices.nodes)
        some = islice(chain.from_iterable(d.values() for d in there), SPEED_SAMPLE)
        return Speed.like(n.speed for n in some)

    def remove(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is None:
            return
        self.num_preemptible -= node.is_preemptible
        self.environments.pop(name, None)
        self._transition(node, NodeState.GONE)
        is_trainer = name == self.trainer
        self.trainers.lost(name)
        self.sources.remove(name)
        self._send_sources_to(self.broadcasts.lost(name, is_trainer))
        self._send_new_sources(self.sources.waiting)

    def why_no_rollout_node(self) -> str | None:
        """Return why no rollout node will take part any more, in one line; None if one may.

        All nodes that the run started must have failed for good, and all others that took part: a
        node that was lost or preempted may return. With `scale.max` more may be started.
        """
        settings, failed = self._settings, self.failed
        if not settings.num_rollouts or len(failed) < settings.num_rollouts or settings.scale_max:
            return None
        if self._rollouts - failed.keys() or any("rollout" in n.roles for n in self.nodes.values()):
            return None
        name, reason = next(iter(failed.items()))
        return f"no rollout node is left: {name}: {reason}"

    def drain(self, node: Node) -> None:
        """Send the node no more work."""
        self._transition(node, NodeState.DRAINING)
        self._send_sources_to(self.broadcasts.refused(node.name, "drains"))
        self._send_new_sources(self.sources.waiting)

    def _transition(self, node: Node, to: NodeState) -> None:
        """Change the state of a node and update all views of `nodes`."""
        node.transition(to)
        node.since = self.now
        self.devices.state_changed(node)
        if self.ready.pop(node.name, None) is not None:
            self.share_ready = self.share_ready - node.share if self.ready else 0.0
        if self.updating.pop(node.name, None) is not None:
            self.share_updating = self.share_updating - node.share if self.updating else 0.0
        if to is NodeState.UPDATING:
            node.share = 1.0 / node.speed.step_s(SHARE_BATCH)
            self.updating[node.name] = node
            self.share_updating += node.share
        elif to is NodeState.READY and "rollout" in node.roles:
            if not node.speed.num_observed:  # others were, since it joined
                node.speed = self._typical_speed()
            node.share = 1.0 / node.speed.step_s(SHARE_BATCH)
            self.ready[node.name] = node
            self.share_ready += node.share
        self.sources.update(node)

    def release(self, node: Node) -> None:
        """Send the node no more work; it gives its devices back."""
        self._transition(node, NodeState.RELEASING)

    def on_asleep(self, node: Node) -> None:
        """The engine of the node is asleep: its devices are free."""
        self._transition(node, NodeState.RELEASED)
        self._send_sources(node)

    def wake(self, node: Node) -> None:
        """The engine of the node is to sample again."""
        self._transition(node, NodeState.UPDATING)

    def expired(self, now: float) -> list[Node]:
        """Return nodes whose lease has expired, and set the time of the next check.

        Nodes are checked only when the oldest lease may have expired, which keeps heartbeats O(1).
        """
        lease = self._settings.lease_s
        gone = [n for n in self.nodes.values() if now - n.heard_at >= lease]
        alive = [n.heard_at for n in self.nodes.values() if now - n.heard_at < lease]
        self.lease_check_at = min(alive) + lease if alive else None
        return gone

    # Weights

    def announce(self, message: PublishWeights, now: float) -> None:
        """A new version is complete at the trainer: send every rollout node its sources, except
        those that receive it by broadcast."""
        self._set_version_of_trainer(message)
        for node in self.nodes.values():
            node.weights_failures = 0
            if node.name in self.ready:
                self._transition(node, NodeState.UPDATING)
            else:
                self.sources.update(node)  # the node does not hold this version
        self.broadcasts.begin(message.policy_version, now)
        for node in self.nodes.values():
            self._send_sources(node)

    def announce_again(self, message: PublishWeights) -> None:
        """Send the newest version again to nodes without it. If it was trained again with another
        digest, no node has it."""
        published, version = self.published, message.policy_version
        is_other = published is not None and published.digest != message.digest
        self._set_version_of_trainer(message)
        for node in self.nodes.values() if is_other else ():
            if node.policy_version == version:
                node.policy_version = None
            if node.name in self.ready:
                self._transition(node, NodeState.UPDATING)
            else:
                self.sources.update(node)
        if self.trainer is not None:
            self.broadcasts.taken(self.trainer, version)
        for node in self.nodes.values():
            if not self.sources.serves_newest(node):
                node.weights_failures = 0
                self._send_sources(node)

    def offer_deltas(self, message: PublishWeights) -> None:
        """The trainer has found the delta to the newest version after it had published it: send it
        to nodes that still pull, if it helps them."""
        published = self.published
        if published is None or message.digest != published.digest:
            return
        if not self.sources.add_deltas(message.deltas):
            return
        for node in self.nodes.values():
            is_pulling = node.state in PULLING and not node.receives
            if is_pulling and self.sources.deltas_for(node):
                self._send_sources(node)

    def _set_version_of_trainer(self, message: PublishWeights) -> None:
        self.set_current_version(message)
        self.sources.trainer = self.trainer

    def set_current_version(self, published: PublishWeights) -> None:
        """Make this version the newest."""
        self.published = published
        self.sources.set_version(published)
        self._remember(published)

    def add_retrained_version(self, retrained: PublishWeights) -> None:
        """Store a version, the newest or an older one, that was trained again with another
        digest."""
        if self.published and retrained.policy_version == self.published.policy_version:
            self.set_current_version(retrained)
        else:
            self._remember(retrained)

    def _remember(self, version: PublishWeights) -> None:
        number, digest = version.policy_version, version.digest
        others = (d for d in self.digests.get(number, ()) if d != digest)
        self.digests[number] = (*others, digest)
        if version.canary is not None:
            self.canaries[number] = version.canary
        oldest = number - self._settings.max_staleness - VERSIONS_REMEMBERED
        self.digests.pop(oldest, None)
        self.canaries.pop(oldest, None)

    def on_trainer_behind(self, policy_version: int) -> None:
        """The trainer has resumed with an older version than the newest, which only other nodes may
        hold."""
        self.sources.withdraw_trainer()
        if self.trainer is not None:
            self.broadcasts.taken(self.trainer, policy_version)
            self._send_new_sources(self.sources.waiting)

    def open_endpoint(self, name: str, endpoint: WeightsEndpoint) -> None:
        """A node serves the weights at this address."""
        node = self.nodes.get(name)
        if node is not None:
            self._send_new_sources(self.sources.open_endpoint(node, endpoint))

    def _send_new_sources(self, names: Iterable[str]) -> None:
        for name in names:
            self._send_sources(self.nodes[name], only_news=True)

    def report_bad_source(self, name: str, report: WeightsFailed) -> None:
        """A node received wrong bytes from a source, which it does not ask again."""
        if self.sources.withdraw_bad(name, report):
            self.num_bad_sources += 1
            what = f"wrong bytes of version {report.policy_version} from {report.source}"
            self._outbox.warn(f"{name}: {what}: {report.reason}")
            if name in self.sources.waiting:
                self._send_sources(self.nodes[name])

    def on_broadcast(self, name: str, status: BroadcastStatus) -> None:
        """Handle a report of the trainer or of a member about a broadcast."""
        self._send_sources_to(self.broadcasts.on_status(name, status))

    def expire_broadcast(self) -> None:
        self._send_sources_to(self.broadcasts.expire(self.now))

    def _send_sources_to(self, names: Iterable[str], but: Node | None = None) -> None:
        for name in names:
            if but is None or name != but.name:
                self._send_sources(self.nodes[name])

    def on_trainer_ready(self) -> None:
        """The trainer has reported its step: nodes that only train are ready."""
        for node in map(self.nodes.__getitem__, self.trainers.names):
            if node.state is NodeState.JOINING and "rollout" not in node.roles:
                self._transition(node, NodeState.READY)

    def _send_sources(self, node: Node, only_news: bool = False) -> None:
        """Send a node the published version and its sources, or note that it waits for a source."""
        if (
            self.published is None
            or "rollout" not in node.roles
            or node.state in {NodeState.DRAINING, NodeState.RELEASING}
            or (node.is_asleep and self.sources.serves_newest(node))
        ):
            return
        group = self.broadcasts.place_of(node.name) if node.receives else None
        if node.receives and (only_news or group is None):
            return  # its group is not open yet, or sends it
        if node.state is NodeState.READY:
            self._transition(node, NodeState.UPDATING)
        if (message := self.sources.message_for(node, only_news, group)) is None:
            return
        if node.state is NodeState.JOINING:
            self._transition(node, NodeState.LOADING)
        self._outbox.send(node.name, message)

    def awaits(self, name: str, ready: WeightsReady) -> bool:
        """Return whether the node pulls the published version and reports that one."""
        node, published = self.nodes.get(name), self.published
        return (
            node is not None
            and published is not None
            and node.state in PULLING
            and (ready.policy_version, ready.digest) == (published.policy_version, published.digest)
        )

    def confirm(self, name: str, ready: WeightsReady) -> None:
        """The engine of a node has loaded a version: the node is ready if the digests agree."""
        node, published = self.nodes.get(name), self.published
        if node is None or published is None or node.state not in {*PULLING, *RESTING}:
            return
        if ready.policy_version != published.policy_version:  # the newer one was sent
            is_newest = node.policy_version == published.policy_version
            if ready.digest in self.digests.get(ready.policy_version, ()) and not is_newest:
                node.base = "" if ready.broadcast_s is not None else ready.digest
                self.sources.update(node)
                if self.sources.deltas_for(node):
                    self._send_sources(node)
            return
        if ready.digest != published.digest:
            if ready.digest in self.digests[ready.policy_version]:
                return  # replaced meanwhile: the current one was sent
            reason = f"digest {ready.digest} is not the published {published.digest}"
            self.refuse(name, WeightsFailed(ready.policy_version, reason))
            return
        is_by_broadcast = ready.broadcast_s is not None
        others = self.broadcasts.confirmed(node, is_by_broadcast)
        node.policy_version, node.weights = ready.policy_version, None
        node.base = "" if is_by_broadcast else ready.digest
        if node.state in PULLING:
            self._transition(node, NodeState.READY)
        else:
            self.sources.update(node)
        self._send_sources_to(others, but=node)
        self._send_new_sources(self.sources.waiting)

    def refuse(self, name: str, failed: WeightsFailed) -> None:
        """A node has failed to serve the published version: send it again, and drain the node after
        MAX_WEIGHTS_FAILURES.

        If the node was ready, its engine has died, and the caller has moved its responses.
        """
        node, published = self.nodes.get(name), self.published
        if node is None or published is None or failed.policy_version != published.policy_version:
            return
        if node.state is NodeState.DRAINING:
            return
        self._send_sources_to(self.broadcasts.refused(name, failed.reason), but=node)
        node.weights_failures += 1
        if node.state is NodeState.READY:
            self._transition(node, NodeState.UPDATING)
            self._outbox.warn(f"{name}: {failed.reason}")
        else:
            self.num_weights_failed += 1
            self._outbox.warn(f"{name}: version {failed.policy_version} failed: {failed.reason}")
        if node.weights_failures < MAX_WEIGHTS_FAILURES:
            self._send_sources(node)
        elif self.sources.trainer is not None:
            reason = f"cannot load version {failed.policy_version}"
            self._outbox.send(name, Drain(name, reason))
            self.failed[name] = f"{reason}: {failed.reason}"
        # else the trainer may be the missing source, and publishes again when it returns


class StaleIncarnations:
    """Incarnations of nodes that were replaced by a restart: their messages are ignored.

    Incarnations are stored, not compared by number: the numbers are times, and a clock may jump.
    """

    def __init__(self) -> None:
        self._replaced: dict[str, deque[int]] = {}  # by node

    def __contains__(self, process: tuple[str, int]) -> bool:
        name, incarnation = process
        return incarnation in self._replaced.get(name, ())

    def __len__(self) -> int:
        """The number of nodes that are stored."""
        return len(self._replaced)

    def add(self, name: str, incarnation: int) -> None:
        """Another incarnation of the node has replaced this one."""
        stale = self._replaced.pop(name, None) or deque(maxlen=MAX_STALE_OF_NODE)
        stale.append(incarnation)
        self._replaced[name] = stale  # in the order of the latest restart
        if len(self._replaced) > MAX_STALE_NODES:
            del self._replaced[next(iter(self._replaced))]
