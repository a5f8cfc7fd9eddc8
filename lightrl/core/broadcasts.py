"""What the trainer and the members of a broadcast group are told, and who must pull instead.

Owns the group of the moment and what was said of it; who is a member, and who is none any more, is
decided in `broadcast_groups.py`. `fleet.py` sends a version to members as to any other node, but
only after all of them have joined. A member is no source, since it gets no file. Groups are not in
the journal: a core that was restored has none, and its nodes send another hello.

Only a group that forms has a deadline here. To send may take long, and who stands still meanwhile
is found out by others, who all say so here:

- The trainer: its ranks have a limit by the size of the version (trainer/broadcasts.py). It goes on
  when all is sent, waits for no member, and has a lease as any node.
- An engine that receives: nothing moves, or nobody says what was sent, for weights.timeout_s.
- An engine that hangs: the ranks, for which nothing moves. If they had sent all, its node, in
  little more than weights.timeout_s (rollout/broadcast.py); the trainer and all others go on.
- A node that gets no manifest: its pull, after weights.timeout_s. One that says nothing: its lease.
- Whoever is late for another reason: the next boundary, to which others bring the run.
"""

from lightrl.core.broadcast_groups import MAX_FAILURES, BroadcastGroups, Candidate, Phase, choose
from lightrl.core.commands import Outbox
from lightrl.core.events import BroadcastNews
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState
from lightrl.core.weight_sources import PULLING, WeightSources
from lightrl.messages.broadcasts import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastOpened,
    BroadcastSums,
    JoinBroadcast,
    OpenBroadcast,
    SendBroadcast,
    VersionTaken,
)

FORMING_TIMEOUTS = 2  # times the time limit of members, who say before it why they are not there
UNREACHABLE = "cannot reach the trainer"
PULLS = ": from now on it pulls all weights"
IS_UP = {NodeState.JOINING, NodeState.READY, *PULLING}


class Broadcasts:
    def __init__(
        self, settings: Settings, nodes: dict[str, Node], sources: WeightSources, outbox: Outbox
    ) -> None:
        self.groups = BroadcastGroups(settings.num_ranks)
        self._settings = settings
        self._nodes = nodes
        self._sources = sources
        self._outbox = outbox
        self._formed_by = 0.0  # the group that forms, or it is over
        self._num_known = 0  # nodes that had joined at the last boundary
        self._is_sent = False  # the version, by the word of the trainer

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called."""
        is_open = self.groups.phase in {Phase.OPENING, Phase.FORMING}
        return self._formed_by if is_open else None

    @property
    def sending(self) -> str:
        """The group by which members get the version now; "" = they are to wait."""
        return self.groups.name if self.groups.phase is Phase.SENDING else ""

    def stage(self, node: Node) -> str:
        """How far its version is: "forming", "sending" or "proving"; "" if none comes so."""
        if not node.receives:
            return ""
        return ("proving" if self._is_sent else "sending") if self.sending else "forming"

    # At the boundary

    def begin(self, policy_version: int, now: float) -> None:
        """A new version is published: decides who gets it by broadcast, and tells the trainer. The
        last one is for nobody but who evaluates it."""
        trainer = self._nodes.get(self._sources.trainer or "")
        if trainer is None:
            return
        self._release(self.groups.receiving)
        self._is_sent = False
        is_last = policy_version >= self._settings.num_steps
        self.groups.trained_by(trainer.name, trainer.incarnation)
        candidates = [] if is_last else self._candidates(policy_version - 1)
        is_cuda, mode = trainer.device.startswith("cuda"), self._settings.broadcast
        self._num_known = max((n.number + 1 for n in self._nodes.values()), default=0)
        self.groups.at_boundary(*choose(candidates, trainer.host, is_cuda, mode))
        for name in self.groups.receiving:
            self._nodes[name].receives = True
            self._sources.update(self._nodes[name])
        self.taken(trainer.name, policy_version)
        if self.groups.phase is Phase.OPENING and self.groups.epoch is not None:
            self._formed_by = now + FORMING_TIMEOUTS * self._settings.weights_timeout_s
            self._outbox.send(trainer.name, OpenBroadcast(self.groups.epoch.number))
        elif self.sending:
            self._outbox.send(trainer.name, SendBroadcast(self.sending, policy_version))

    def taken(self, trainer: str, policy_version: int) -> None:
        """The trainer waits for this word, also on a version that it publishes again."""
        if self._settings.broadcast == "off" or policy_version >= self._settings.num_steps:
            return
        is_sent, wants = self.groups.phase is not Phase.NONE, self._wants_delta(policy_version)
        self._outbox.send(trainer, VersionTaken(policy_version, is_sent, wants))

    def _wants_delta(self, policy_version: int) -> bool:
        """Whether a node that pulls has the version before, or is at it."""
        return policy_version == self._sources.policy_version and any(
            n.state in IS_UP
            and n.state is not NodeState.READY
            and "rollout" in n.roles
            and not n.receives
            and self._sources.can_use_delta(n)
            for n in self._nodes.values()
        )

    def _candidates(self, before: int) -> list[Candidate]:
        """Rollout nodes that serve the version before, or have come since, and will stay: one that
        still loads the version before may stand still, and a group would wait for it. None while
        nobody knows where the trainer serves the manifest. The trainer's own node reads what it has
        published."""
        trainer = self._sources.trainer
        if trainer not in self._sources.endpoints:
            return []
        return [
            Candidate(
                n.name,
                n.incarnation,
                n.host,
                n.num_workers,
                is_busy=bool(n.running),
                is_cuda=n.device.startswith("cuda"),
            )
            for n in self._nodes.values()
            if n.num_workers
            and n.state in IS_UP
            and (n.policy_version == before or n.number >= self._num_known)
            and "rollout" in n.roles
            and n.name != trainer
            and not (n.is_preemptible or n.shares)
            and not self.groups.excludes(n.name, n.incarnation)
        ]

    # What they say. Each returns the nodes that must be offered the version now.

    def on_message(self, name: str, message: BroadcastNews) -> list[str]:
        is_trainer = name == self._sources.trainer
        match message:
            case BroadcastOpened() if is_trainer:
                return self._opened(name, message)
            case BroadcastJoined(group):
                return self._joined(group, None if is_trainer else name)
            case BroadcastSums(group, policy_version, _) if is_trainer:
                if (group, policy_version) == (self.sending, self._sources.policy_version):
                    self._is_sent = True
                    for member in sorted(self.groups.receiving):
                        self._outbox.send(member, message)
            case BroadcastFailed(group, reason, is_unreachable):
                epoch, is_open = self.groups.epoch, self.groups.phase is Phase.OPENING
                is_member = epoch is not None and name in epoch.members
                if group == self.groups.name and (is_trainer or (is_member and not is_open)):
                    return self._fail(name, reason, is_unreachable)
                if is_unreachable and self.groups.exclude_late(group, name):
                    self._outbox.warn(f"{name} {UNREACHABLE}{PULLS}")
            case _:
                pass  # only a trainer says that
        return []

    def _opened(self, trainer: str, opened: BroadcastOpened) -> list[str]:
        if (epoch := self.groups.opened(opened.epoch, opened.group)) is None:
            return []
        if opened.reason or not opened.group:
            return self._fail(trainer, opened.reason)
        ranks = ((trainer, 0), *zip(epoch.members, epoch.first_ranks, strict=True))
        for name, rank in ranks:
            place = rank, epoch.num_ranks, epoch.world
            join = JoinBroadcast(opened.group, opened.address, *place, epoch.backend)
            self._outbox.send(name, join)
        return []

    def _joined(self, group: str, name: str | None) -> list[str]:
        version, trainer = self._sources.policy_version, self._sources.trainer
        if version is None or trainer is None or not self.groups.joined(group, name):
            return []
        self._outbox.send(trainer, SendBroadcast(group, version))
        return sorted(self.groups.receiving)

    def confirmed(self, node: Node, is_by_broadcast: bool) -> list[str]:
        """This node serves the version."""
        if not node.receives:
            return []
        if not (self.sending and is_by_broadcast):
            return self._fail(node.name, "has the version already")
        node.receives = False
        self.groups.received(node.name)
        return []

    def refused(self, name: str, reason: str) -> list[str]:
        """This node cannot serve what it was to get, or says hello again, or leaves."""
        epoch = self.groups.epoch
        return self._fail(name, reason) if epoch is not None and name in epoch.members else []

    def lost(self, name: str, is_trainer: bool, reason: str = "lost") -> list[str]:
        """This process has gone, or the trainer's has to say anew where it stands."""
        epoch, is_awaited = self.groups.epoch, bool(self.groups.receiving)
        owed = self.groups.lost(name, is_trainer)
        is_over = epoch is not None and self.groups.epoch is None
        if epoch is not None and is_over:
            self._outbox.warn(f"broadcast group {epoch.number} is over: {name} {reason}")
        # also where it was the only one to whom it was to be sent
        return self._over(owed, tells_trainer=is_over and is_awaited and not is_trainer)

    def expire(self, now: float) -> list[str]:
        """A group that does not come about is over: its members wait for it."""
        if self.deadline is None or now < self.deadline:
            return []
        limit_s = FORMING_TIMEOUTS * self._settings.weights_timeout_s
        return self._fail("", f"not formed within {limit_s:g} s")

    def _fail(self, name: str, reason: str, is_unreachable: bool = False) -> list[str]:
        """`name` is a member, or else nobody is to blame."""
        epoch = self.groups.epoch
        if epoch is None:
            return []
        owed = self.groups.fail(name, is_unreachable)
        who = f"{name}: " if name else ""
        self._outbox.warn(f"broadcast group {epoch.number} is over: {who}{reason}")
        node = self._nodes.get(name)
        if node is not None and self.groups.excludes(name, node.incarnation):
            why = UNREACHABLE if is_unreachable else f"ended {MAX_FAILURES} groups"
            self._outbox.warn(f"{name} {why}{PULLS}")
        return self._over(owed, tells_trainer=bool(owed))

    def _over(self, owed: set[str], tells_trainer: bool) -> list[str]:
        """Those that were receiving pull, and the trainer need not wait."""
        self._release(owed)
        version, trainer = self._sources.policy_version, self._sources.trainer
        if tells_trainer and version is not None and trainer is not None:
            self.taken(trainer, version)
        return sorted(name for name in owed if name in self._nodes)

    def _release(self, names: set[str]) -> None:
        for name in names:
            if (node := self._nodes.get(name)) is not None:
                node.receives = False
                self._sources.update(node)
