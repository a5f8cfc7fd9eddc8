"""A trainer's part in broadcasts: rank 0 sends a version to a group, as the coordinator orders.

Owns the coordinator's order and the commands to rank 0. Which nodes receive a version the
coordinator decides; when rank 0 is free `Trainer`. A failure ends the group only: nodes pull
instead. Must not import torch: the daemon imports this file.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

from lightrl.config.schema import Config
from lightrl.errors import WeightsError
from lightrl.messages.broadcasts import BroadcastGroup, BroadcastStatus, VersionTaken
from lightrl.messages.message import Message
from lightrl.trainer.protocol import Done, OpenGroup, SendWeights
from lightrl.trainer.rank_processes import Ranks
from lightrl.weights.broadcast.membership import UNWANTED, Membership, transfer_limit_s
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

TAKEN_S = 1.0  # from a publication to the coordinator's VersionTaken, which it sends immediately
# of the members' time limit: a rank that leaves a group is held up by one operation at most
GRACE_TIMEOUTS = 1.25
ENDS = "the trainer ends"
GONE = "the coordinator is gone"


class BroadcastOrders:
    def __init__(
        self,
        config: Config,
        host: str,
        send: Callable[[Message], None],
        changed: asyncio.Event,
    ) -> None:
        """Members meet on `host`, an address of this machine; 0.0.0.0 = all. `send` reaches the
        coordinator, if it listens; `changed` is set when there is something new to do, or nothing
        more to wait for."""
        self._host = host
        self._send = send
        self._changed = changed
        self._timeout_s = config.weights.timeout_s  # of the members
        self._taken: VersionTaken | None = None  # the last one
        self._order: VersionTaken | None = None  # not carried out yet
        self._over: asyncio.Future[str] | None = None  # why rank 0 has to stop sending
        self._is_stopping = False

    @property
    def has_order(self) -> bool:
        return self._order is not None

    def handle(self, message: VersionTaken) -> None:
        if self._is_stopping:
            self._refuse(message, ENDS)
            return
        known, self._taken = self._taken, message
        is_repeated = (
            known is not None
            and known.policy_version == message.policy_version
            and known.broadcast == message.broadcast
        )
        if not is_repeated:
            self._order = message if message.broadcast is not None else None
            self._end(UNWANTED)
        self._changed.set()

    def clear(self) -> None:
        """The coordinator is gone, or these ranks are, and with them their groups; rank 0 leaves
        its group when the next one forms."""
        self._taken = self._order = None
        self._end(GONE)
        self._changed.set()

    def stop(self) -> None:
        """The trainer ends: nothing more is sent."""
        self._is_stopping = True
        if self._order is not None:
            self._refuse(self._order, ENDS)
        self._taken = self._order = None
        self._end(ENDS)
        self._changed.set()

    def _end(self, why: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(why)

    def _refuse(self, order: VersionTaken, reason: str, group: str = "") -> None:
        if order.broadcast is not None:
            name = group or order.broadcast.group
            self._send(BroadcastStatus(order.policy_version, name, reason=reason))

    async def follow(self, ranks: Ranks, file: VersionFile) -> bool:
        """After a version was published: send it, if the coordinator orders that. Returns whether
        nodes want the difference to the version before, also if the coordinator is silent.

        Raises RanksLost.
        """
        version = file.policy_version
        await self._until(lambda: self._is_taken(version))
        if self.has_order and not await self.perform(ranks, file):
            await self._until(lambda: self._taken is None or self._taken.broadcast is None)
        return self._taken is None or not self._is_taken(version) or self._taken.wants_delta

    async def perform(self, ranks: Ranks, file: VersionFile) -> bool:
        """Carry out the order, `file` being the newest version. Returns whether all was sent.
        Raises RanksLost."""
        order, self._order = self._order, None
        if order is None or order.broadcast is None:
            return False
        version, wanted, group = order.policy_version, order.broadcast, order.broadcast.group
        try:
            if version != file.policy_version:
                raise WeightsError(f"version {version} is not the newest, {file.policy_version}")
            if not group:
                group = secrets.token_hex(16)
                place = BroadcastGroup(group, "", 0, wanted.world, wanted.backend)
                ranks.send(0, OpenGroup(self._host, Membership(place, self._timeout_s)))
                opened = await self._answer(ranks, 2 * self._timeout_s)
                self._send(BroadcastStatus(version, group, opened.address))
            ranks.send(0, SendWeights(file, group))
            limit_s = transfer_limit_s(file.num_bytes, self._timeout_s)
            await self._answer(ranks, limit_s)
        except WeightsError as e:
            reason = str(e).removeprefix("broadcast: ")
            logger.warning("no broadcast: %s", reason)
            if reason != GONE:  # else the order is of a coordinator that no longer waits for it
                self._refuse(order, reason, group)
            return False
        return True

    async def _answer(self, ranks: Ranks, limit_s: float) -> Done:
        """Return rank 0's reply to its last command. Raises WeightsError, also if cancelled."""
        over = self._over = asyncio.get_running_loop().create_future()
        try:
            grace_s = GRACE_TIMEOUTS * self._timeout_s
            answer = await ranks.answer(over, limit_s, grace_s)
        finally:
            self._over = None
        if answer.error is not None:
            raise WeightsError(answer.error)
        return answer

    def _is_taken(self, version: int) -> bool:
        return self._taken is not None and self._taken.policy_version == version

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for a message of the coordinator, for TAKEN_S at most."""
        try:
            async with asyncio.timeout(TAKEN_S):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
