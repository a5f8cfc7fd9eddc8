"""Choose the nodes that receive a version by broadcast, as one group; all other nodes pull it.

Owns the current group, the members that still need the version, and the excluded nodes. A group
serves many versions; its members are chosen again only when a version is published. A node that
joins between two versions pulls. Any failure ends the group: each member without the version pulls
it, and the next version opens a new group. A process that took part in MAX_FAILURES failed
broadcasts in a row is excluded: the member that reported the failure, or all members that still
needed the version if the trainer reported it or the next version was published first.

A member is not a source, since it stores no file. Groups are not in the journal: a restored core
has none, and its nodes send another Hello. Only the opening of a group has a deadline here. The
trainer and the members limit the other phases themselves and report failures
(weights/broadcast/membership.py); a silent node loses its lease.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightrl.core.commands import Outbox
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState
from lightrl.core.weights.weight_sources import PULLING, WeightSources
from lightrl.messages.broadcasts import (
    Backend,
    BroadcastGroup,
    BroadcastOrder,
    BroadcastStatus,
    VersionTaken,
)

MAX_FAILURES = 3
OPENING_TIMEOUTS = 2  # times weights.timeout_s; the trainer may be busy with another broadcast
IS_UP = {NodeState.JOINING, NodeState.READY, *PULLING}


class Phase(StrEnum):
    # there is no group
    NONE = "none"
    # the trainer was asked for the address of the group
    OPENING = "opening"
    # a version is being sent; a new group forms first
    SENDING = "sending"
    # all members have the version
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Members:
    """The members: (incarnation, rank of its first worker) by name. The trainer has rank 0.
    Example: Members({"rollout-0": (17, 1)}, 2, "gloo")"""

    members: dict[str, tuple[int, int]]
    world: int
    backend: Backend


class Broadcasts:
    def __init__(
        self, settings: Settings, nodes: dict[str, Node], sources: WeightSources, outbox: Outbox
    ) -> None:
        self.phase = Phase.NONE
        self.group: Members | None = None  # None if and only if the phase is NONE
        self.name = ""  # of the group; "" until it is opened
        self.receiving: set[str] = set()  # members that do not have the version
        self.num_groups = 0
        self.num_sent = 0  # versions that all members have received
        self.num_lost = 0  # groups ended by a lost or late member or by a failure
        self._address = ""
        self._settings = settings
        self._nodes = nodes
        self._sources = sources
        self._outbox = outbox
        self._open_until = 0.0
        self._num_known = 0  # nodes that had joined when the last version was published

    @property
    def deadline(self) -> float | None:
        """The time at which to call `expire`."""
        return self._open_until if self.phase is Phase.OPENING else None

    def stage(self, node: Node) -> str:
        """Return "forming" or "sending"; "" if the node receives no version by broadcast."""
        if not node.receives:
            return ""
        return "sending" if self.phase is Phase.SENDING else "forming"

    def place_of(self, name: str) -> BroadcastGroup | None:
        """Return the place of a receiving node in the group; None while it has to wait."""
        if self.phase is not Phase.SENDING or self.group is None:
            return None
        _, rank = self.group.members[name]
        return BroadcastGroup(self.name, self._address, rank, self.group.world, self.group.backend)

    # When a version is published

    def begin(self, policy_version: int, now: float) -> None:
        """Choose the nodes that receive a new version, and send the order to the trainer. The last
        version is only for nodes that evaluate it."""
        trainer = self._nodes.get(self._sources.trainer or "")
        if trainer is None:
            return
        if self.receiving:  # the version before
            self._close(self.receiving)
        is_last = policy_version >= self._settings.num_steps
        chosen = [] if is_last else self._choose(trainer, policy_version - 1)
        self._num_known = max((n.number + 1 for n in self._nodes.values()), default=0)
        wanted = _group_of(trainer, chosen)
        if wanted is None or wanted != self.group:
            self._close(is_failure=False)
        if wanted is not None:
            self.phase = Phase.SENDING if wanted == self.group else Phase.OPENING
            self.num_groups += self.phase is Phase.OPENING
            self.group, self.receiving = wanted, set(wanted.members)
            self._open_until = now + OPENING_TIMEOUTS * self._settings.weights_timeout_s
        for node in chosen:
            node.receives = True
            self._sources.update(node)
        self.taken(trainer.name, policy_version)

    def taken(self, trainer: str, policy_version: int) -> None:
        """Send the trainer the message it waits for, also for a version published again."""
        if self._settings.broadcast == "off" or policy_version >= self._settings.num_steps:
            return
        order = None
        if self.receiving and self.group is not None:
            order = BroadcastOrder(self.name, self.group.world, self.group.backend)
        wants = self._wants_delta(policy_version)
        self._outbox.send(trainer, VersionTaken(policy_version, wants, order))

    def _wants_delta(self, policy_version: int) -> bool:
        """Return whether a node that pulls this version can use a delta."""
        return policy_version == self._sources.policy_version and any(
            n.state in IS_UP
            and n.state is not NodeState.READY
            and "rollout" in n.roles
            and not n.receives
            and self._sources.can_use_delta(n)
            for n in self._nodes.values()
        )

    def _choose(self, trainer: Node, before: int) -> list[Node]:
        """Return the members, by name: rollout nodes that serve the version before, or joined
        since, and are neither preemptible nor take turns on devices. A node that still loads the
        version before is left out, since the group would wait for it. Empty while the trainer, from
        which members pull the manifest, has no endpoint.

        "auto": idle nodes, so that generation does not stop, except those on the trainer's machine,
        which map the version's file. "always": busy and local ones, too; with NCCL no local ones,
        since two processes of one device cannot both be members.
        """
        mode = self._settings.broadcast
        if mode == "off" or trainer.name not in self._sources.endpoints:
            return []
        found = [
            n
            for n in self._nodes.values()
            if n.num_workers
            and n.state in IS_UP
            and (n.policy_version == before or n.number >= self._num_known)
            and "rollout" in n.roles
            and n is not trainer
            and not (n.is_preemptible or n.takes_turns)
            and n.broadcast_failures < MAX_FAILURES
            and (mode == "always" or not (n.running or n.host == trainer.host))
        ]
        if _backend(trainer, found) == "nccl":
            found = [n for n in found if n.host != trainer.host]
        return sorted(found, key=lambda n: n.name)

    # Events of the group. Each returns the nodes that must be sent the version now.

    def on_status(self, name: str, status: BroadcastStatus) -> list[str]:
        """Handle a report of the trainer or of a member."""
        is_trainer = name == self._sources.trainer
        is_opening = is_trainer and self.phase is Phase.OPENING
        if is_opening and status.policy_version == self._sources.policy_version:
            if status.reason:
                return self._end(name, status.reason)
            self.phase, self.name, self._address = Phase.SENDING, status.group, status.address
            return sorted(self.receiving)
        if status.reason and status.group == self.name != "" and (is_trainer or self._has(name)):
            return self._end(name, status.reason)
        return []

    def confirmed(self, node: Node, is_by_broadcast: bool) -> list[str]:
        """Handle a node that serves the version."""
        if not node.receives:
            return []
        if not (self.phase is Phase.SENDING and is_by_broadcast):
            return self._end(node.name, "has the version already")
        node.receives = False
        self.receiving.discard(node.name)
        if not self.receiving and self.group is not None:
            self.phase = Phase.IDLE
            self.num_sent += 1
            for name in self.group.members:
                self._nodes[name].broadcast_failures = 0
        return []

    def refused(self, name: str, reason: str) -> list[str]:
        """Handle a node that cannot serve the version, sends another Hello, or leaves."""
        return self._end(name, reason) if self._has(name) else []

    def lost(self, name: str, is_trainer: bool, reason: str = "lost") -> list[str]:
        """Handle the end of a process, or another Hello of the trainer. A new process of the
        trainer may reach nodes that the one before did not."""
        if not is_trainer:
            return self.refused(name, reason)
        for node in self._nodes.values():
            node.broadcast_failures = 0
        return self._end(name, reason, is_trainer_lost=True)

    def expire(self, now: float) -> list[str]:
        """End a group that the trainer does not open in time."""
        if self.deadline is None or now < self.deadline:
            return []
        limit_s = OPENING_TIMEOUTS * self._settings.weights_timeout_s
        return self._end("the trainer", f"did not open it within {limit_s:g} s")

    def _has(self, name: str) -> bool:
        return self.group is not None and name in self.group.members

    def _end(self, name: str, reason: str, is_trainer_lost: bool = False) -> list[str]:
        """End the group because of a member or the trainer: receiving members pull, and the trainer
        stops sending."""
        if self.group is None:
            return []
        self._outbox.warn(f"broadcast group {self.num_groups} is over: {name}: {reason}")
        is_awaited = bool(self.receiving)
        failed = {name} if self._has(name) else self.receiving
        owed = self._close(failed if is_awaited and not is_trainer_lost else ())
        version, trainer = self._sources.policy_version, self._sources.trainer
        if is_awaited and version is not None and trainer is not None and not is_trainer_lost:
            self.taken(trainer, version)
        return owed

    def _close(self, failed: Iterable[str] = (), is_failure: bool = True) -> list[str]:
        """Close the group, and count the failure of these members. Return those that pull now."""
        for node in (self._nodes[name] for name in sorted(failed) if name in self._nodes):
            node.broadcast_failures += 1
            if node.broadcast_failures == MAX_FAILURES:
                what = f"was in {MAX_FAILURES} failed broadcasts in a row"
                self._outbox.warn(f"{node.name} {what}: from now on it pulls all weights")
        owed = sorted(name for name in self.receiving if name in self._nodes)
        self.num_lost += is_failure and self.group is not None
        self.phase, self.group, self.name, self._address = Phase.NONE, None, "", ""
        self.receiving = set()
        for name in owed:
            self._nodes[name].receives = False
            self._sources.update(self._nodes[name])
        return owed


def _backend(trainer: Node, members: Sequence[Node]) -> Backend:
    is_cuda = all(n.device.startswith("cuda") for n in (trainer, *members))
    return "nccl" if is_cuda else "gloo"


def _group_of(trainer: Node, members: Sequence[Node]) -> Members | None:
    """Return the group of these members; None if there are none."""
    world, ranks = 1, dict[str, tuple[int, int]]()
    for member in members:
        ranks[member.name] = member.incarnation, world
        world += member.num_workers
    return Members(ranks, world, _backend(trainer, members)) if members else None
