"""A trainer's part in broadcasts: what the coordinator wants of its ranks as members of a group.

Owns the coordinator's orders, in its order, and what the ranks are told for each of them. Who
receives which version is the coordinator's business; when the ranks are free for orders is the
supervisor's. Whatever goes wrong with a group ends the group only: nodes pull instead. Must not
import torch: the daemon imports this file.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from lightrl.broadcast_messages import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastOpened,
    BroadcastSums,
    JoinBroadcast,
    OpenBroadcast,
    SendBroadcast,
    VersionTaken,
)
from lightrl.config import Config
from lightrl.errors import WeightsError
from lightrl.messages import Message
from lightrl.system.addresses import WILDCARD, split_address
from lightrl.system.threads import in_thread
from lightrl.trainer.protocol import (
    GroupJoined,
    GroupOpened,
    JoinGroup,
    OpenGroup,
    SendWeights,
    WeightsSent,
)
from lightrl.trainer.rank_processes import Ranks
from lightrl.weights.broadcast.rendezvous import Membership, give_up
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

Order: TypeAlias = OpenBroadcast | JoinBroadcast | SendBroadcast

TAKEN_S = 1.0  # from a publication to the coordinator's word of it: it says it at once
# Bytes a second: a rank that has not sent a version at this rate is taken to hang, and is killed.
# Whoever waits for bytes gives the group up long before, after the time limit without progress.
LEAST_RATE = 10e6
_SUM = 1 << 64  # sums are added up modulo this


class Broadcasts:
    def __init__(
        self,
        config: Config,
        host: str,
        send: Callable[[Message], None],
        changed: asyncio.Event,
    ) -> None:
        """Members meet on `host`, an address of this machine. `send` reaches the coordinator, if it
        listens; `changed` is set when there is something new to do, or nothing more to wait for."""
        self._host = host
        self._send = send
        self._changed = changed
        self._timeout_s = config.weights.timeout_s  # of the members
        self._limit_s = 2 * self._timeout_s  # in which they notice themselves what goes wrong
        self._orders: deque[Order] = deque()
        self._taken: VersionTaken | None = None  # the last one
        self._opened = ("", "")  # name and address of the group that was opened last
        self._num_cleared = 0
        self._num_words = 0  # after which all groups that form are over

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def handle(self, message: VersionTaken | Order) -> None:
        if isinstance(message, VersionTaken):
            self._taken = message
            self._num_words += 1
            self._orders.clear()  # of a group that is over: orders follow what they are about
        else:
            self._orders.append(message)
        self._changed.set()

    def clear(self) -> None:
        """Nobody waits for us any more: the coordinator is gone, or these ranks are. Groups are
        over with them; ranks leave theirs when the next one forms."""
        self._orders.clear()
        self._taken = None
        self._num_cleared += 1
        self._num_words += 1
        self._changed.set()

    async def follow(self, ranks: Ranks, file: VersionFile) -> bool:
        """After a version was published: carries out what the coordinator orders for it, until it
        was sent or is pulled by all. Returns whether nodes want the difference to the version
        before, as they do where the coordinator says nothing.

        Raises RanksLost.
        """
        version = file.policy_version
        await self._until(lambda: self._word_of(version) is not None, TAKEN_S)
        patience_s = self._limit_s  # members are waited for by the coordinator
        while self._is_awaited(version):
            if not await self._until(
                lambda: self.has_orders or not self._is_awaited(version), patience_s
            ):
                logger.warning("version %d: no orders for its broadcast came", version)
                break
            if self.has_orders and not await self.perform(ranks, file):
                patience_s = TAKEN_S  # we have said so, and are told that it is over
        taken = self._word_of(version)
        return taken is None or taken.wants_delta

    async def perform(self, ranks: Ranks, file: VersionFile) -> bool:
        """Carries out the oldest order, `file` being the newest version; whether it could. Raises
        RanksLost."""
        order, num_cleared = self._orders.popleft(), self._num_cleared
        is_done = True
        try:
            match order:
                case OpenBroadcast(epoch):
                    answer = await self._open(ranks, epoch)
                case JoinBroadcast():
                    answer = await self._join(ranks, order)
                case SendBroadcast(group, policy_version):
                    answer = await self._send_weights(ranks, file, group, policy_version)
        except WeightsError as e:
            reason = str(e).removeprefix("broadcast: ")
            logger.warning("no broadcast: %s", reason)
            is_done = False
            if isinstance(order, OpenBroadcast):
                answer = BroadcastOpened(order.epoch, "", "", reason)
            else:
                answer = BroadcastFailed(order.group, reason)
        if num_cleared == self._num_cleared:  # else it was another coordinator's order
            self._send(answer)
            if isinstance(answer, BroadcastSums) and self._taken is not None:
                self._taken = replace(self._taken, broadcasts=False)
        return is_done

    async def _open(self, ranks: Ranks, epoch: int) -> BroadcastOpened:
        ranks.send(0, OpenGroup(self._host))
        [opened] = await ranks.answers(GroupOpened, self._limit_s, (0,))
        if opened.error is not None:
            raise WeightsError(opened.error)
        self._opened = (secrets.token_hex(16), opened.address)
        return BroadcastOpened(epoch, *self._opened)

    async def _join(self, ranks: Ranks, order: JoinBroadcast) -> BroadcastJoined:
        name, address = self._opened
        if order.group != name:
            raise WeightsError("another group was opened since")
        if order.num_ranks != len(ranks) or order.world <= len(ranks):
            raise WeightsError(f"{order.num_ranks} ranks of {order.world}, not {len(ranks)}")
        self._opened = ("", "")  # the listener is used up
        place = Membership(name, 0, len(ranks), order.world, order.backend, self._timeout_s)
        for rank in range(len(ranks)):
            ranks.send(rank, JoinGroup(address, replace(place, rank=rank)))
        joining = asyncio.ensure_future(ranks.answers(GroupJoined, self._limit_s))
        try:
            await self._unless_over(joining, place, address)
            _raise_first(await joining)
        finally:
            joining.cancel()
        return BroadcastJoined(name)

    async def _unless_over(
        self, joining: "asyncio.Future[Any]", place: Membership, address: str
    ) -> None:
        """Until the ranks are in the group, or will not be: they need not wait for members who the
        coordinator knows will not come."""
        num_words = self._num_words
        while not joining.done():
            if self._num_words > num_words:
                host, port = split_address(address) or ("", 0)
                meet = ("127.0.0.1" if host == WILDCARD else host, port)
                await in_thread(partial(give_up, meet, place))
                return
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({joining, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()

    async def _send_weights(
        self, ranks: Ranks, file: VersionFile, group: str, policy_version: int
    ) -> BroadcastSums:
        if policy_version != file.policy_version:
            raise WeightsError(
                f"version {policy_version} is not the newest, which is {file.policy_version}"
            )
        ranks.tell(SendWeights(file, group))
        limit_s = self._limit_s + file.num_bytes / LEAST_RATE
        sent = await ranks.answers(WeightsSent, limit_s)
        _raise_first(sent)
        sums = tuple(sum(of_ranks) % _SUM for of_ranks in zip(*(s.sums for s in sent), strict=True))
        return BroadcastSums(group, policy_version, sums)

    def _word_of(self, version: int) -> VersionTaken | None:
        taken = self._taken
        return taken if taken is not None and taken.policy_version == version else None

    def _is_awaited(self, version: int) -> bool:
        """It was announced that it goes by broadcast, and that is not over."""
        taken = self._word_of(version)
        return taken is not None and taken.broadcasts

    async def _until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Waits for what comes with `changed`; whether it came in time."""
        try:
            async with asyncio.timeout(limit_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return holds()
        return True


def _raise_first(answers: list[GroupJoined] | list[WeightsSent]) -> None:
    """Raises WeightsError for the first rank that says why not."""
    for answer in answers:
        if answer.error is not None:
            raise WeightsError(answer.error)
