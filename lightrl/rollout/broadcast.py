"""A node as a receiver of broadcasts: what its engine receives, and whether that is still wanted.

Owns which version the engine receives. Forms no group: the engine does so. Which nodes are members
the coordinator decides.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from lightrl.engine.base import DropBroadcast, EngineCommand, ReceiveWeights
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.message import Message
from lightrl.messages.weights import PublishWeights
from lightrl.rollout.fetched import are_same
from lightrl.system.addresses import not_everywhere
from lightrl.weights.broadcast.membership import Membership, transfer_limit_s
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

# Times the time limit of a group, in which an engine notices by itself that nothing moves, even one
# whose workers are other processes. It may need a moment more to end what it does, and the first
# look (system/child.py) may take away an eighth.
PATIENCE = 1.5


class BroadcastMember:
    """One node's part in broadcasts, for any engine; `started` and `ended` follow the engine."""

    def __init__(
        self, send: Callable[[Message], None], coordinator_host: str, timeout_s: float
    ) -> None:
        """`timeout_s`: how long a member of a group waits without progress."""
        self.patience_s = PATIENCE * timeout_s
        self._send = send
        self._coordinator_host = coordinator_host
        self._timeout_s = timeout_s
        self._order: Callable[[EngineCommand], None] | None = None  # of an engine, if there is one
        self._announced: PublishWeights | None = None  # its manifest is being pulled
        self._receiving: PublishWeights | None = None
        self._is_withdrawn = False

    @property
    def is_receiving(self) -> bool:
        """The engine waits for the trainer and other members; see `limit_s`."""
        return self._receiving is not None and not self._is_withdrawn

    @property
    def is_ending(self) -> bool:
        """The engine has to drop what it receives, and has not answered."""
        return self._receiving is not None and self._is_withdrawn

    def limit_s(self, offer: PublishWeights) -> float:
        """Return the time limit for the engine to receive this version."""
        return self.patience_s + transfer_limit_s(offer.num_bytes, self._timeout_s)

    def started(self, order: Callable[[EngineCommand], None]) -> None:
        self._order = order

    def ended(self) -> None:
        """The engine has ended, and with it what it received; the agent reports that."""
        self._order = self._announced = None
        self.answered()

    def offered(self, message: PublishWeights) -> None:
        """Another version than the one that is being received is wanted from now on."""
        receiving = self._receiving
        is_same = receiving is not None and are_same(receiving, message)
        if receiving is not None and not is_same and not self._is_withdrawn:
            logger.info("version %d: not wanted by broadcast any more", receiving.policy_version)
            self._is_withdrawn = True
            if self._order is not None:
                self._order(DropBroadcast())
        self._announced = message if message.group and not is_same else None

    def receive(self, file: VersionFile, offer: PublishWeights) -> bool:
        """Order the engine to receive this version; `answered` must follow. False if it is not the
        one that was offered last."""
        announced, group = self._announced, offer.group
        if self._order is None or group is None or announced is None:
            return False
        if not are_same(announced, offer):
            return False
        self._announced, self._receiving = None, offer
        address = not_everywhere(group.address, self._coordinator_host)
        place = Membership(replace(group, address=address), self._timeout_s)
        self._order(ReceiveWeights(file, place, offer.canary))
        return True

    def answered(self) -> bool:
        """The engine receives nothing any more. Returns whether the version was wanted until the
        end."""
        is_wanted = not self._is_withdrawn
        self._receiving, self._is_withdrawn = None, False
        return is_wanted

    def fail(self, offer: PublishWeights, reason: str) -> None:
        """The version cannot be received here: report it, so that no member waits for it."""
        if self._announced is not None and are_same(self._announced, offer):
            self._announced = None
        if offer.group is not None:
            name = offer.group.name
            status = BroadcastStatus(offer.policy_version, name, reason=reason[:MAX_TEXT])
            self._send(status)
