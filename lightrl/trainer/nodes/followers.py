"""The other trainer nodes as the leading node sees them, and their ranks.

Their ranks are used as those of this machine are (rank_processes.py), by way of the coordinator. A
message that may be lost on that way ends all ranks. Must not import torch: the daemon imports this
file.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn

from lightrl.errors import ProtocolError, TrainerError
from lightrl.messages.message import Message
from lightrl.messages.trainers import Follower as Member
from lightrl.messages.trainers import TrainerRelay
from lightrl.system.child import ChildDied
from lightrl.system.timeouts import silent_for
from lightrl.trainer.protocol import RANK_COMMANDS, RANK_EVENTS, RankCommand, RankEvent, StartRank
from lightrl.wire import Codec

logger = logging.getLogger(__name__)


class RanksLost(TrainerError):
    """A rank has died, or lost another one; all of them can restart from a checkpoint."""


@dataclass(frozen=True, slots=True)
class RankFrame:
    """The content of each TrainerRelay: a command for this rank, or an event of it, encoded for its
    pipe. An empty frame ends all ranks of this life on the node.

    A life is the time from one start of all ranks to their end: frames of another one are dropped.
    """

    life: str
    rank: int
    frame: bytes = b""


FRAMES: Codec[RankFrame] = Codec(RankFrame)


class RemoteRank:
    """A rank of another node, with the methods of `Child`."""

    def __init__(self, rank: int, node: str, send: Callable[[bytes], None]) -> None:
        self.name = f"lightrl-rank-{rank} of {node}"
        self._send = send
        self._events: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_received = 0

    def send(self, command: RankCommand) -> None:
        self._send(RANK_COMMANDS.encode(command))

    def on_frame(self, frame: bytes) -> None:
        self._num_received += 1
        self._events.put_nowait(frame)

    async def receive(self) -> RankEvent:
        return RANK_EVENTS.decode(await self._events.get())

    async def require_answers(self, owes: Callable[[], bool], limit_s: float) -> NoReturn:
        await silent_for(owes, lambda: self._num_received, limit_s)
        raise ChildDied(f"{self.name} hangs: no answer for {limit_s:g} s")

    async def stop(self, grace_s: float = 0.0) -> None:
        """`Followers.end` does it."""

    def kill(self) -> None:
        """Do nothing, as `stop`: `Followers.end` ends the ranks."""


class Followers:
    """The nodes that follow one leader. `set_members` and `receive` are called for messages of the
    coordinator; after `start`, always `end`."""

    def __init__(self, num_needed: int, send: Callable[[Message], None]) -> None:
        """`send` reaches the coordinator whenever there is a connection."""
        self._num_needed = num_needed
        self._send = send
        self._members: tuple[Member, ...] = ()
        self._used: tuple[Member, ...] = ()  # those on which ranks run
        self._life = ""
        self._ranks: dict[tuple[str, int], RemoteRank] = {}  # by node and number
        self._lost: asyncio.Future[RanksLost] | None = None
        self._changed = asyncio.Event()

    def set_members(self, members: tuple[Member, ...]) -> None:
        """Use these followers; () = some are missing."""
        now = dict(members)
        if gone := [name for name, number in self._used if now.get(name) != number]:
            self._lose(f"trainer node {', '.join(gone)} lost")
        self._members = members
        self._changed.set()

    def disconnect(self) -> None:
        """Messages may have been lost; the coordinator names the followers again."""
        self._members = ()
        self._lose("the connection to the other trainer nodes was lost")

    def receive(self, relay: TrainerRelay) -> None:
        try:
            message = FRAMES.decode(relay.frame)
        except ProtocolError as e:
            logger.warning("%s: %s", relay.node, e)
            return
        rank = self._ranks.get((relay.node, message.rank))
        if rank is not None and message.life == self._life:
            rank.on_frame(message.frame)

    async def wait(self) -> Literal[True]:
        """Wait until all of them have joined."""
        while len(self._members) != self._num_needed:
            self._changed.clear()
            await self._changed.wait()
        return True

    def start(self, starts: list[StartRank], per_node: int) -> list[RemoteRank]:
        """Start the ranks of all nodes, in order. Raises RanksLost if a node is missing."""
        if len(self._members) != self._num_needed:
            raise RanksLost("a trainer node is missing")
        self._life, self._used = secrets.token_hex(16), self._members
        self._lost = asyncio.get_running_loop().create_future()
        self._ranks = {}
        for k, command in enumerate(starts):
            node = self._used[k // per_node][0]
            send = partial(self._send_frame, self._life, node, command.rank)
            rank = self._ranks[node, command.rank] = RemoteRank(command.rank, node, send)
            rank.send(command)
        return list(self._ranks.values())

    async def watch(self) -> NoReturn:
        """Raises RanksLost when a node is gone."""
        assert self._lost is not None  # ranks run
        raise await self._lost

    def end(self) -> None:
        for node, _ in self._used:
            self._send_frame(self._life, node, 0, b"")
        self._life, self._used, self._ranks = "", (), {}

    def _send_frame(self, life: str, node: str, rank: int, frame: bytes) -> None:
        self._send(TrainerRelay(node, FRAMES.encode(RankFrame(life, rank, frame))))

    def _lose(self, why: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(RanksLost(why))
