"""A trainer node that follows: its ranks do what the node that leads tells them.

Owns the rank processes of this node for one life at a time, and how that ends. Decides nothing:
commands come from the leader by way of the coordinator, and go to the ranks as they are. Must not
import torch: the daemon imports this file.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.errors import LightRLError, ProtocolError
from lightrl.messages.message import Message
from lightrl.messages.trainers import TrainerRelay
from lightrl.system.child import Child, ChildDied
from lightrl.system.threads import in_thread
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.protocol import (
    TO_FOLLOWER,
    TO_LEADER,
    EndRanks,
    RankSaid,
    RanksGone,
    RankTold,
    StartRanks,
    ToFollower,
    ToLeader,
)
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    RankCommand,
    RankEvent,
    RankParked,
    RankStarted,
)
from lightrl.trainer.rank_processes import STOP_S, start_rank

logger = logging.getLogger(__name__)

SEEN_S = 10.0  # until a file that one machine has written must be there on another one
LOOK_S = 0.2

Rank = Child[RankCommand, RankEvent]


class _Life:
    """The ranks of one life on this node, as far as they are started."""

    def __init__(self, start: StartRanks) -> None:
        self.start = start
        self.name = start.life
        self.ranks: dict[int, Rank] = {}
        self.task: asyncio.Task[None] | None = None  # starts them, and hears them
        self._early: list[RankTold] = []  # came before their rank was started

    def tell(self, told: RankTold) -> None:
        if told.rank in self.ranks:
            self.ranks[told.rank].forward(told.frame)
        else:
            self._early.append(told)

    def add(self, number: int, rank: Rank) -> None:
        self.ranks[number] = rank
        for told in [t for t in self._early if t.rank == number]:
            rank.forward(told.frame)

    async def end(self, is_orderly: bool) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        if not is_orderly:  # those that are left of a set hang in a collective
            for rank in self.ranks.values():
                rank.kill()
        await asyncio.gather(*(rank.stop(STOP_S) for rank in self.ranks.values()))


class Follower:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        send: Callable[[Message], None],
        gpus: Sequence[str] = (),
        host: str = "127.0.0.1",
        answer: Callable[[Message], None] | None = None,
    ) -> None:
        """`send` reaches the coordinator whenever there is a connection, `answer` when it hears
        this node. `host`: an address of this machine that the other trainer nodes reach."""
        self.devices = NodeDevices(config, answer or send)
        self._config = config
        self._run_dir = run_dir
        self._send = send
        self._gpus = gpus
        self._host = host
        self._leader = ""
        self._life: _Life | None = None  # that the leader wants
        self._running: _Life | None = None  # what there is
        self._to_do: asyncio.Queue[_Life | EndRanks | None] = asyncio.Queue()
        self._is_stopping = False

    def led_by(self, leader: str) -> None:
        """This node leads now; "" = nobody does: without it the ranks here only wait for others."""
        if not leader and self._life is not None:
            self._to_do.put_nowait(EndRanks(self._life.name))
        self._leader = leader

    def break_off(self) -> None:
        """Messages may have been lost."""
        self.led_by("")

    def stop(self) -> None:
        """To leave when the leader has ended the life that goes on here."""
        self._is_stopping = True
        self._to_do.put_nowait(None)

    def hear(self, relay: TrainerRelay) -> None:
        try:
            message: ToFollower = TO_FOLLOWER.decode(relay.frame)
        except ProtocolError as e:
            logger.warning("%s: %s", relay.node, e)
            return
        if isinstance(message, StartRanks):
            self._leader, self._life = relay.node, _Life(message)
            self._to_do.put_nowait(self._life)
        elif self._life is None or message.life != self._life.name:
            pass  # of a life that is over
        elif isinstance(message, RankTold):
            if self.devices.are_shared:
                self.devices.told(RANK_COMMANDS.decode(message.frame))
            self._life.tell(message)
        else:
            self._to_do.put_nowait(message)

    async def run(self) -> None:
        """Until it was asked to stop and no life goes on. When cancelled, nothing is left."""
        try:
            while not (self._is_stopping and self._life is None):
                match await self._to_do.get():
                    case _Life() as life:
                        await self._end()
                        if life is self._life:
                            self._running = life
                            life.task = asyncio.create_task(self._live(life), name="ranks")
                    case EndRanks(name, is_orderly) if self._life and self._life.name == name:
                        self._life = None
                        await self._end(is_orderly)
                    case _:
                        pass
        finally:
            await self._end()

    async def _end(self, is_orderly: bool = False) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            await running.end(is_orderly)
            if not is_orderly:
                self.devices.lost()

    async def _live(self, life: _Life) -> None:
        """Starts the ranks of a life and hands on what they say, until one of them is gone."""
        folder = Path(life.start.proof).parent
        try:
            if not await _sees(Path(life.start.proof), life.name):
                why = (
                    f"does not see {folder}: checkpoint.dir must be a folder that all trainer "
                    "nodes see"
                )
                self._tell(RanksGone(life.name, why, is_final=True))
                return
            self.devices.starting()
            for k, command in enumerate(life.start.starts):
                here = replace(
                    command,
                    host=self._host,
                    nccl_host=self._host if command.nccl_host else "",
                    publish_dir=str(folder),  # nothing is published here
                )
                gpus = self._gpus[k : k + 1]
                life.add(command.rank, await start_rank(self._config, self._run_dir, here, gpus))
            await asyncio.gather(*(self._hand_on(life, n) for n in life.ranks))
        except (LightRLError, OSError) as e:
            is_final = isinstance(e, LightRLError) and not isinstance(e, ChildDied)
            self._tell(RanksGone(life.name, str(e), is_final))

    async def _hand_on(self, life: _Life, number: int) -> None:
        while True:
            event = await life.ranks[number].receive()
            self.devices.heard(number, event)
            if isinstance(event, RankStarted) or (
                isinstance(event, RankParked) and not event.is_asked
            ):
                self.devices.announce()
                self.devices.published()
            self._tell(RankSaid(life.name, number, RANK_EVENTS.encode(event)))

    def _tell(self, message: ToLeader) -> None:
        if self._life is not None and message.life == self._life.name and self._leader:
            self._send(TrainerRelay(self._leader, TO_LEADER.encode(message)))


async def _sees(proof: Path, text: str) -> bool:
    """Whether this file is there, with this text, within SEEN_S."""
    deadline = time.monotonic() + SEEN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if await in_thread(proof.read_text) == text:
                return True
        await asyncio.sleep(LOOK_S)
    return False
