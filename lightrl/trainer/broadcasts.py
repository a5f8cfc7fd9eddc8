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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from lightrl.config.schema import Config
from lightrl.errors import WeightsError
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
from lightrl.messages.message import Message
from lightrl.trainer.protocol import GroupOpened, LeaveGroup, OpenGroup, SendWeights, WeightsSent
from lightrl.trainer.rank_processes import Ranks
from lightrl.weights.broadcast.rendezvous import UNWANTED, GroupJoined, JoinGroup, Membership
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

Order: TypeAlias = OpenBroadcast | JoinBroadcast | SendBroadcast
Reply = TypeVar("Reply", GroupOpened, GroupJoined, WeightsSent)

TAKEN_S = 1.0  # from a publication to the coordinator's word of it: it says it at once
# Bytes a second: a version that is not sent at this rate is to be pulled. Whoever waits for bytes
# gives the group up long before, after the time limit without progress.
LEAST_RATE = 10e6
# of the members' time limit: a rank that leaves a group is held up by one operation at most
GRACE_TIMEOUTS = 1.25
ENDS = "the trainer ends"
_SUM = 1 << 64  # sums are added up modulo this


@dataclass(frozen=True, slots=True)
class Opened:
    """Where rank 0 of these ranks listens, for whom."""

    ranks: Ranks
    group: str
    address: str


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
        self._grace_s = GRACE_TIMEOUTS * self._timeout_s  # in which ranks leave a group
        self._opened: Opened | None = None  # until the ranks are told to join it
        self._over: asyncio.Future[str] | None = None  # why that is what the ranks are at
        self._num_cleared = 0
        self._is_stopping = False

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def handle(self, message: VersionTaken | Order) -> None:
        if self._is_stopping:
            if not isinstance(message, VersionTaken):
                self._send(_refusal(message, ENDS))
        elif isinstance(message, VersionTaken):
            is_said_again = message.broadcasts and self._is_awaited(message.policy_version)
            self._taken = message
            if not is_said_again:
                self._orders.clear()  # of a group that is over: orders follow what they are about
                self._end(UNWANTED)
        else:
            self._orders.append(message)
        self._changed.set()

    def clear(self) -> None:
        """Nobody waits for us any more: the coordinator is gone, or these ranks are. Groups are
        over with them; ranks leave theirs when the next one forms."""
        self._orders.clear()
        self._taken = None
        self._num_cleared += 1
        self._end("the coordinator is gone")
        self._changed.set()

    def stop(self) -> None:
        """The trainer ends: nothing more is sent, and whoever counts on it is told so."""
        self._is_stopping = True
        for order in self._orders:
            self._send(_refusal(order, ENDS))
        self._orders.clear()
        self._taken = None
        self._end(ENDS)
        self._changed.set()

    def _end(self, why: str) -> None:
        """Of the group that forms, or is sent to; one that stands stays."""
        if self._over is not None and not self._over.done():
            self._over.set_result(why)
        if self._opened is not None:  # members would wait there
            self._opened.ranks.send(0, LeaveGroup())
            self._opened = None

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
            answer = _refusal(order, reason)
        if num_cleared == self._num_cleared:  # else it was another coordinator's order
            self._send(answer)
            if isinstance(answer, BroadcastSums) and self._taken is not None:
                self._taken = replace(self._taken, broadcasts=False)
        return is_done

    async def _open(self, ranks: Ranks, epoch: int) -> BroadcastOpened:
        ranks.send(0, OpenGroup(self._host))
        [at] = await self._answers(ranks, GroupOpened, self._limit_s, (0,))
        self._opened = opened = Opened(ranks, secrets.token_hex(16), at.address)
        return BroadcastOpened(epoch, opened.group, opened.address)

    async def _join(self, ranks: Ranks, order: JoinBroadcast) -> BroadcastJoined:
        opened = self._opened
        if opened is None or order.group != opened.group:
            raise WeightsError("another group was opened since")
        num = ranks.num_local  # who has the version's file
        if order.num_ranks != num or order.world <= num:
            why = f"{order.num_ranks} ranks of {order.world}, not {num}"
            self._end(why)
            raise WeightsError(why)
        self._opened = None  # the listener is used up
        place = Membership(order.group, 0, num, order.world, order.backend, self._timeout_s)
        for rank in range(num):
            ranks.send(rank, JoinGroup(opened.address, replace(place, rank=rank)))
        await self._answers(ranks, GroupJoined, self._limit_s)
        return BroadcastJoined(order.group)

    async def _send_weights(
        self, ranks: Ranks, file: VersionFile, group: str, policy_version: int
    ) -> BroadcastSums:
        if policy_version != file.policy_version:
            raise WeightsError(
                f"version {policy_version} is not the newest, which is {file.policy_version}"
            )
        for rank in range(ranks.num_local):
            ranks.send(rank, SendWeights(file, group))
        limit_s = self._limit_s + file.num_bytes / LEAST_RATE
        sent = await self._answers(ranks, WeightsSent, limit_s)
        sums = tuple(sum(of_ranks) % _SUM for of_ranks in zip(*(s.sums for s in sent), strict=True))
        return BroadcastSums(group, policy_version, sums)

    async def _answers(
        self, ranks: Ranks, kind: type[Reply], limit_s: float, of: Sequence[int] | None = None
    ) -> list[Reply]:
        """What these ranks, all of this machine by default, say to what they were told, unless it
        is over before. Raises WeightsError for the first one that says why not."""
        over = self._over = asyncio.get_running_loop().create_future()
        try:
            asked = range(ranks.num_local) if of is None else of
            answers = await ranks.answers(kind, over, limit_s, self._grace_s, asked)
        finally:
            self._over = None
        for answer in answers:
            if answer.error is not None:
                raise WeightsError(answer.error)
        return answers

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


def _refusal(order: Order, reason: str) -> BroadcastOpened | BroadcastFailed:
    if isinstance(order, OpenBroadcast):
        return BroadcastOpened(order.epoch, "", "", reason)
    return BroadcastFailed(order.group, reason)
