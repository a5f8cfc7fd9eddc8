"""Carry out the coordinator's orders to broadcast a version: rank 0 sends it to a group.

Owns the current order and the commands to rank 0. The coordinator decides which nodes receive a
version, and the supervisor decides when rank 0 is free. A failure ends only the group: its nodes
pull the version instead. Must not import torch: the daemon imports this file.
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

TAKEN_S = 1.0  # limit from a publication to VersionTaken, which the coordinator sends immediately
# multiple of the members' time limit: a rank that leaves a group waits for one operation at most
GRACE_TIMEOUTS = 1.25
ENDS = "the trainer is stopping"
GONE = "the coordinator was lost"


class BroadcastOrders:
    def __init__(
        self,
        config: Config,
        host: str,
        send: Callable[[Message], None],
        changed: asyncio.Event,
    ) -> None:
        """`host`: address of this machine at which members meet; 0.0.0.0 = all addresses. `send`
        sends to the coordinator if it is connected. `changed` is set when an order arrives or a
        wait can end."""
        self._host = host
        self._send = send
        self._changed = changed
        self._timeout_s = config.weights.timeout_s  # of the members
        self._taken: VersionTaken | None = None  # the last one received
        self._order: VersionTaken | None = None  # the order that is not carried out yet
        self._over: asyncio.Future[str] | None = None  # the reason why rank 0 must stop sending
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
        """Forget all orders after the loss of the coordinator or of these ranks, which ends their
        groups. Rank 0 leaves its group when the next one forms."""
        self._taken = self._order = None
        self._end(GONE)
        self._changed.set()

    def stop(self) -> None:
        """Refuse the current order and all later ones: the trainer is stopping."""
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
        """Send a version after its publication, if the coordinator orders it. Return whether nodes
        need the delta from the previous version; True if the coordinator does not answer.

        Raises RanksLost.
        """
        version = file.policy_version
        await self._until(lambda: self._is_taken(version))
        if self.has_order and not await self.perform(ranks, file):
            await self._until(lambda: self._taken is None or self._taken.broadcast is None)
        return self._taken is None or not self._is_taken(version) or self._taken.wants_delta

    async def perform(self, ranks: Ranks, file: VersionFile) -> bool:
        """Carry out the order; `file` is the newest version. Return whether all of it was sent.
        Raises RanksLost."""
        order, self._order = self._order, None
        if order is None or order.broadcast is None:
            return False
        version, wanted, group = order.policy_version, order.broadcast, order.broadcast.group
        try:
            if version != file.policy_version:
                raise WeightsError(f"version {version} is not the newest: {file.policy_version}")
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
            if reason != GONE:  # a lost coordinator no longer waits for the result
                self._refuse(order, reason, group)
            return False
        return True

    async def _answer(self, ranks: Ranks, limit_s: float) -> Done:
        """Return rank 0's reply to its last command. Raises WeightsError, also after `_end`."""
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
        """Wait until `holds()` is true after a message from the coordinator, or for TAKEN_S."""
        try:
            async with asyncio.timeout(TAKEN_S):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
