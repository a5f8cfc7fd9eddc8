"""The trainer role of a daemon where several nodes train together: it leads, or it follows.

The coordinator decides which; a node that leads does so until it ends (supervisor.py). The ranks of
a follower carry out the leader's commands, which come by way of the coordinator. Must not import
torch: the daemon imports this file.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.errors import LightRLError, ProtocolError
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.message import Message
from lightrl.messages.sharing import SetDevices
from lightrl.messages.trainers import TrainerRelay, TrainerSet
from lightrl.messages.training import TrainShard
from lightrl.system.child import ChildDied
from lightrl.system.threads import in_thread
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.protocol import (
    TO_FOLLOWER,
    TO_LEADER,
    RankFrame,
    RanksGone,
    StartRanks,
    ToFollower,
    ToLeader,
)
from lightrl.trainer.protocol import RANK_COMMANDS, RANK_EVENTS, RankStarted, StepFinished
from lightrl.trainer.rank_processes import STOP_S, Place, Rank, start_rank
from lightrl.trainer.saves import Saves
from lightrl.trainer.supervisor import Trainer

logger = logging.getLogger(__name__)

SEEN_S = 10.0  # until a file that one machine has written is visible on another
LOOK_S = 0.2


class RankProcesses:
    """The ranks of one life on this node, as far as they are started."""

    def __init__(self, start: StartRanks) -> None:
        self.start = start
        self.name = start.life
        self.ended = asyncio.Event()  # the leader wants them no more
        self.is_orderly = False
        self.ranks: dict[int, Rank] = {}
        self._early: dict[int, list[bytes]] = defaultdict(list)  # frames for ranks that start

    def send(self, rank: int, frame: bytes) -> None:
        if rank in self.ranks:
            self.ranks[rank].forward(frame)
        else:
            self._early[rank].append(frame)

    def add(self, number: int, rank: Rank) -> None:
        self.ranks[number] = rank
        for frame in self._early.pop(number, []):
            rank.forward(frame)

    def end(self, is_orderly: bool = False) -> None:
        self.is_orderly = is_orderly
        self.ended.set()

    async def close(self) -> None:
        for rank in self.ranks.values():
            if not self.is_orderly:  # those that are left of a set hang in a collective
                rank.kill()
        await asyncio.gather(*(rank.stop(STOP_S) for rank in self.ranks.values()))


class Follower:
    """Has the members of `Trainer` that a daemon uses."""

    device = ""
    saves: Saves | None = None
    all_steps_done = False

    def __init__(
        self,
        config: Config,
        place: Place,
        send: Callable[[Message], None],
        answer: Callable[[Message], None] | None = None,
    ) -> None:
        """`send` reaches the coordinator whenever there is a connection, `answer` once it has
        welcomed this node."""
        self.devices = NodeDevices(config, answer or send)
        self._config = config
        self._place = place
        self._send = send
        self._leader = ""
        self._life: RankProcesses | None = None  # the newest
        self._lives: asyncio.Queue[RankProcesses | None] = asyncio.Queue()

    def set_leader(self, leader: str) -> None:
        """Follow this node; "" = none, without which the ranks here only wait for others."""
        if not leader and self._life is not None:
            self._life.end()
        self._leader = leader

    def handle(self, message: object) -> None:
        if isinstance(message, SetDevices) and not message.active:
            self.devices.ask(message.number)

    def pause(self) -> None:
        self.devices.forget_orders()

    def rejoin(self) -> None:
        """The leader decides."""

    async def close(self) -> None:
        """Nothing is served here."""

    def stop(self) -> None:
        """Leave when the leader has ended the present life."""
        self._lives.put_nowait(None)

    def receive(self, relay: TrainerRelay) -> None:
        try:
            message: ToFollower = TO_FOLLOWER.decode(relay.frame)
        except ProtocolError as e:
            logger.warning("%s: %s", relay.node, e)
            return
        if isinstance(message, StartRanks):
            if self._life is not None:
                self._life.end()
            self._leader, self._life = relay.node, RankProcesses(message)
            self._lives.put_nowait(self._life)
        elif self._life is None or self._life.ended.is_set() or message.life != self._life.name:
            pass  # of ranks that have ended
        elif isinstance(message, RankFrame):
            if self.devices.are_shared:
                self.devices.on_command(RANK_COMMANDS.decode(message.frame))
            self._life.send(message.rank, message.frame)
        else:
            self._life.end(message.is_orderly)

    async def run(self) -> None:
        """Run one life after the other until it is stopped. When cancelled, nothing is left."""
        while (life := await self._lives.get()) is not None:
            work = asyncio.create_task(self._run_ranks(life), name="ranks")
            try:
                await life.ended.wait()
            finally:
                work.cancel()
                await asyncio.wait([work])
                await life.close()
                if not life.is_orderly:
                    self.devices.lost()

    async def _run_ranks(self, life: RankProcesses) -> None:
        """Start the ranks of a life and relay their events until one of them is gone."""
        proof = Path(life.start.proof)
        try:
            if not await _sees(proof, life.name):
                why = f"does not see {proof.parent}: checkpoint.dir must be a folder that all "
                self._report(RanksGone(life.name, f"{why}trainer nodes see", is_final=True))
                return
            self.devices.starting()
            for k, command in enumerate(life.start.starts):
                here = replace(
                    command,
                    host=self._place.host,
                    nccl_host=self._place.host if command.nccl_host else "",
                    publish_dir=str(proof.parent),  # nothing is published here
                )
                life.add(command.rank, await start_rank(self._config, self._place, here, k))
            await asyncio.gather(*(self._relay_events(life, n) for n in life.ranks))
        except (LightRLError, OSError) as e:
            is_final = isinstance(e, LightRLError) and not isinstance(e, ChildDied)
            self._report(RanksGone(life.name, str(e), is_final))

    async def _relay_events(self, life: RankProcesses, number: int) -> None:
        while True:
            event = await life.ranks[number].receive()
            self.devices.on_event(number, event)
            if isinstance(event, RankStarted | StepFinished):
                self.devices.announce()
                self.devices.published()
            self._report(RankFrame(life.name, number, RANK_EVENTS.encode(event)))

    def _report(self, message: ToLeader) -> None:
        if self._life is not None and message.life == self._life.name and self._leader:
            self._send(TrainerRelay(self._leader, TO_LEADER.encode(message)))


class TrainerNode:
    def __init__(
        self,
        name: str,
        follower: Follower,
        new_trainer: Callable[[], Trainer],
        leave: Callable[[str], None],
    ) -> None:
        """`leave` asks this node's daemon to leave, for a reason."""
        self._name = name
        self._follower = follower
        self._new_trainer = new_trainer
        self._leave = leave
        self._trainer: Trainer | None = None  # if this node leads
        self._is_stopping = False
        self._leads = asyncio.Event()

    @property
    def role(self) -> Trainer | Follower:
        return self._trainer or self._follower

    @property
    def leads(self) -> bool:
        return self._trainer is not None

    @property
    def devices(self) -> NodeDevices:
        return self.role.devices

    @property
    def device(self) -> str:
        return self.role.device

    @property
    def saves(self) -> Saves | None:
        return self.role.saves

    @property
    def all_steps_done(self) -> bool:
        return self.role.all_steps_done

    def handle(
        self,
        message: TrainShard | VersionTaken | SetDevices | TrainerSet | TrainerRelay,
    ) -> None:
        match message:
            case TrainerSet(leader, followers) if leader == self._name:
                self._lead().followers.set_members(followers)
            case TrainerSet(leader):
                if self._trainer is None:
                    self._follower.set_leader(leader)
                elif leader:
                    self._leave(f"{leader} leads the trainer nodes now")
                else:
                    self._trainer.followers.set_members(())
            case TrainerRelay():
                (self._trainer.followers if self._trainer else self._follower).receive(message)
            case _:
                self.role.handle(message)

    def _lead(self) -> Trainer:
        if self._trainer is None:
            self._trainer = self._new_trainer()
            if self._is_stopping:
                self._trainer.stop()
            self._leads.set()
        return self._trainer

    def pause(self) -> None:
        self.role.pause()

    def rejoin(self) -> None:
        self.role.rejoin()

    def disconnect(self) -> None:
        """Messages of other trainer nodes may have been lost."""
        if self._trainer is not None:
            self._trainer.followers.disconnect()
        else:
            self._follower.set_leader("")

    def stop(self) -> None:
        self._is_stopping = True
        self.role.stop()

    async def run(self) -> None:
        """Run until it is stopped. Raises TrainerError as the supervisor does."""
        following = asyncio.create_task(self._follower.run(), name="follower")
        leads = asyncio.create_task(self._leads.wait())
        try:
            await asyncio.wait({following, leads}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                return
        finally:
            for task in (following, leads):
                task.cancel()
            await asyncio.wait({following, leads})
        assert self._trainer is not None
        await self._trainer.run()

    async def close(self) -> None:
        await self.role.close()


async def _sees(proof: Path, text: str) -> bool:
    """Whether this file exists with this text within SEEN_S."""
    deadline = time.monotonic() + SEEN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if await in_thread(proof.read_text) == text:
                return True
        await asyncio.sleep(LOOK_S)
    return False
