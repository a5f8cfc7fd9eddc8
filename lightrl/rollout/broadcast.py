"""A node as a member of broadcast groups: what its engine is told of them, and what it answers.

Owns the group of the engine that runs, which version it receives, and the two words that decide on
that: what the training ranks have sent, or that it is not wanted any more. Each is said to the
engine as soon as it is known, once. Forms no group: that is the engine's business, and who is a
member the coordinator's.
"""

import logging
from collections.abc import Callable

from lightrl.engine.base import EngineCommand, ProveWeights, ReceiveWeights
from lightrl.messages.broadcasts import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastSums,
    JoinBroadcast,
)
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.message import Message
from lightrl.messages.weights import PublishWeights
from lightrl.rollout.fetched import are_same
from lightrl.system.addresses import not_everywhere
from lightrl.weights.broadcast.rendezvous import GroupJoined, JoinGroup, Membership
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

# Times the time limit of a group: in that an engine notices by itself that nothing moves, even one
# whose workers are processes that cannot be told. It may need a moment more to end what it was at,
# and of this the first look (system/child.py) may take away an eighth.
PATIENCE = 1.5


class BroadcastMember:
    """Of one node, whatever engine it has: `started` and `ended` say which."""

    def __init__(
        self, send: Callable[[Message], None], coordinator_host: str, timeout_s: float
    ) -> None:
        """`timeout_s`: how long a member of a group waits while nothing moves."""
        self.patience_s = PATIENCE * timeout_s
        self._send = send
        self._coordinator_host = coordinator_host
        self._timeout_s = timeout_s
        self._order: Callable[[EngineCommand], None] | None = None  # of an engine, if there is one
        self._group = ""  # that the engine is in, or was told last to join
        self._num_joining = 0  # orders to join that it has not answered
        self._num_before = 0  # of these, before a version that it was told to load
        self._sums: BroadcastSums | None = None  # that came last
        self._announced: PublishWeights | None = None  # to come, the engine has not been told yet
        self._receiving: PublishWeights | None = None
        self._has_said = False  # to the engine, how what it receives ends
        self._is_withdrawn = False

    @property
    def is_joining(self) -> bool:
        """The engine waits for other members."""
        return self._num_joining > 0

    @property
    def is_joining_first(self) -> bool:
        """The same, before it loads the version that it has been told to load."""
        return self._num_before > 0

    @property
    def is_receiving(self) -> bool:
        """The engine waits for training ranks, or for what they say that they have sent."""
        return self._receiving is not None and not self._has_said

    @property
    def is_ending(self) -> bool:
        """The engine has been told how what it receives ends, what was sent or that it be dropped,
        and has not answered. What is still to come is in buffers on its way, with no rank."""
        return self._receiving is not None and self._has_said

    def started(self, order: Callable[[EngineCommand], None]) -> None:
        self._order = order

    def ended(self, reason: str) -> None:
        """The engine has: so has its group."""
        group = self._group
        self._order, self._group, self._num_joining, self._num_before = None, "", 0, 0
        self._announced = None
        self.answered()
        if group:
            self._send(BroadcastFailed(group, reason[:MAX_TEXT]))

    # Who is a member

    def join(self, message: JoinBroadcast) -> None:
        if self._order is None:
            self._send(BroadcastFailed(message.group, "no engine runs here now"))
            return
        place = Membership(
            message.group,
            message.rank,
            message.num_ranks,
            message.world,
            message.backend,
            self._timeout_s,
        )
        self._group, self._num_joining = message.group, self._num_joining + 1
        self._order(JoinGroup(not_everywhere(message.address, self._coordinator_host), place))

    def joined(self, answer: GroupJoined) -> None:
        self._num_joining -= 1
        self._num_before = max(0, self._num_before - 1)
        if answer.error is None:
            self._send(BroadcastJoined(answer.name))
        else:
            reason = answer.error[:MAX_TEXT]
            self._send(BroadcastFailed(answer.name, reason, answer.is_unreachable))

    # What comes

    def pulled(self) -> None:
        """The engine is told to load a version that has not come by broadcast."""
        self._num_before = self._num_joining

    def offered(self, message: PublishWeights) -> None:
        """What comes by broadcast, if it is not this, is not wanted any more."""
        if self._announced is not None and self._announced.group != message.group:
            self._leave(self._announced.group)
        receiving = self._receiving
        is_same = receiving is not None and are_same(receiving, message)
        if receiving is not None and not is_same and not self._has_said:
            logger.info("version %d: not wanted by broadcast any more", receiving.policy_version)
            self._is_withdrawn = True
            self._say(())
        self._announced = message if message.group and not is_same else None

    def receive(self, file: VersionFile, offer: PublishWeights) -> bool:
        """The engine does, from now on, and `answered` must follow. False if this is not what was
        offered last."""
        announced = self._announced
        if self._order is None or announced is None or not are_same(announced, offer):
            return False
        self._announced = None
        self._receiving, self._has_said = offer, False
        self._order(ReceiveWeights(file, offer.group, offer.canary))
        if self._sums is not None:
            self.take_sums(self._sums)
        return True

    def take_sums(self, message: BroadcastSums) -> None:
        """They may come before the engine has begun, or when it has failed."""
        self._sums = message
        receiving = self._receiving
        if receiving is not None and (message.group, message.policy_version) == (
            receiving.group,
            receiving.policy_version,
        ):
            self._say(message.sums)

    def answered(self) -> bool:
        """Nothing is received any more; whether it was wanted until the end."""
        is_wanted = not self._is_withdrawn
        self._receiving, self._is_withdrawn = None, False
        return is_wanted

    def fail(self, group: str, reason: str) -> None:
        """Nothing can be received here: nobody shall wait for this node."""
        if self._announced is not None and self._announced.group == group:
            self._announced = None
        self._send(BroadcastFailed(group, reason[:MAX_TEXT]))
        self._leave(group)

    def _leave(self, group: str) -> None:
        """While nothing is received."""
        if self._order is not None and group == self._group:
            self._group = ""
            self._order(ProveWeights(()))

    def _say(self, sums: tuple[int, ...]) -> None:
        if self._order is not None and not self._has_said:
            self._has_said = True
            self._order(ProveWeights(sums))
