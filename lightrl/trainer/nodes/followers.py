"""The other trainer nodes as the leading node sees them, and their ranks.

Their ranks are used as those of this machine are (rank_processes.py), by way of the coordinator. A
message that may be lost on that way ends all ranks. Must not import torch: the daemon imports this
file.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

from lightrl.errors import ProtocolError, TrainerError
from lightrl.messages.message import Message
from lightrl.messages.trainers import Follower, TrainerRelay
from lightrl.system import files
from lightrl.system.child import ChildDied
from lightrl.system.threads import in_thread
from lightrl.system.timeouts import silent_for
from lightrl.trainer.nodes.protocol import (
    TO_FOLLOWER,
    TO_LEADER,
    EndRanks,
    RankFrame,
    RanksGone,
    StartRanks,
    ToFollower,
)
from lightrl.trainer.protocol import RANK_COMMANDS, RANK_EVENTS, RankCommand, RankEvent, StartRank

logger = logging.getLogger(__name__)


class RanksLost(TrainerError):
    """A rank has died, or lost another one; all of them can restart from a checkpoint."""


class RemoteRank:
    """A rank of another node, with the methods of `Child`."""

    def __init__(self, rank: int, node: str, send: Callable[[bytes], None]) -> None:
        self.name = f"lightrl-rank-{rank} of {node}"
        self.rank = rank
        self.node = node
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
        """Its node ends it with the life."""

    def kill(self) -> None:
        """As `stop`."""


class Life:
    """The ranks on other nodes, from one start to their end. `begin` once, always `end`."""

    def __init__(self, members: tuple[Follower, ...], send: Callable[[Message], None]) -> None:
        self.name = secrets.token_hex(16)
        self.members = members
        self.ranks: list[RemoteRank] = []
        self._send = send
        self._proof: Path | None = None
        self._lost: asyncio.Future[TrainerError] = asyncio.get_running_loop().create_future()

    async def begin(self, starts: list[StartRank], per_node: int, checkpoints: Path) -> None:
        """Start the ranks of all other nodes, in order. Raises TrainerError if `checkpoints` cannot
        be written."""
        self._proof = proof = checkpoints / f".life-{self.name}"
        try:
            await in_thread(_write, proof, self.name)
        except OSError as e:
            raise TrainerError(f"{checkpoints}: cannot be written: {e.strerror or e}") from None
        for k, (node, _) in enumerate(self.members):
            mine = tuple(starts[k * per_node : (k + 1) * per_node])
            self.ranks += [RemoteRank(s.rank, node, self._sender(node, s.rank)) for s in mine]
            self._send_to(node, StartRanks(self.name, mine, str(proof)))

    def _sender(self, node: str, rank: int) -> Callable[[bytes], None]:
        return lambda frame: self._send_to(node, RankFrame(self.name, rank, frame))

    def _send_to(self, node: str, message: ToFollower) -> None:
        self._send(TrainerRelay(node, TO_FOLLOWER.encode(message)))

    def receive(self, node: str, message: RankFrame | RanksGone) -> None:
        if message.life != self.name:
            return
        if isinstance(message, RanksGone):
            kind = TrainerError if message.is_final else RanksLost
            self.lose(kind(f"{node}: {message.reason}"))
            return
        for rank in self.ranks:
            if (rank.node, rank.rank) == (node, message.rank):
                rank.on_frame(message.frame)

    def lose(self, why: TrainerError) -> None:
        if not self._lost.done():
            self._lost.set_result(why)

    async def watch(self) -> NoReturn:
        """Raises RanksLost when a node is gone, TrainerError if a restart would fail, too."""
        raise await self._lost

    async def end(self, is_orderly: bool) -> None:
        self.lose(RanksLost("their life is over"))
        for node, _ in self.members:
            self._send_to(node, EndRanks(self.name, is_orderly))
        if (proof := self._proof) is not None:
            with contextlib.suppress(OSError):
                await in_thread(proof.unlink, True)


class Followers:
    """The nodes that follow one leader. `set_members` and `receive` are called for messages of the
    coordinator."""

    def __init__(self, num_needed: int, send: Callable[[Message], None]) -> None:
        """`send` reaches the coordinator whenever there is a connection."""
        self._num_needed = num_needed
        self._send = send
        self._members: tuple[Follower, ...] = ()
        self._life: Life | None = None
        self._changed = asyncio.Event()

    def set_members(self, members: tuple[Follower, ...]) -> None:
        """Use these followers; () = some are missing."""
        if self._life is not None and members != self._life.members:
            now = dict(members)
            gone = [name for name, number in self._life.members if now.get(name) != number]
            self._life.lose(RanksLost(f"trainer node {', '.join(gone) or 'set'} lost"))
        self._members = members
        self._changed.set()

    def disconnect(self) -> None:
        """Messages may have been lost; the coordinator names the followers again."""
        self._members = ()
        if self._life is not None:
            self._life.lose(RanksLost("lost touch with the other trainer nodes"))

    def receive(self, relay: TrainerRelay) -> None:
        try:
            message = TO_LEADER.decode(relay.frame)
        except ProtocolError as e:
            logger.warning("%s: %s", relay.node, e)  # sent before this node led
            return
        if self._life is not None:
            self._life.receive(relay.node, message)

    async def wait(self) -> Literal[True]:
        """Wait until all of them have joined."""
        while len(self._members) != self._num_needed:
            self._changed.clear()
            await self._changed.wait()
        return True

    def new_life(self) -> Life:
        self._life = Life(self._members, self._send)
        return self._life


def _write(path: Path, text: str) -> None:
    files.make_folder(path.parent)
    path.write_text(text)
