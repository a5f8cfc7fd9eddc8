"""The trainer role of a daemon where several nodes train together: it leads, or it follows.

The coordinator decides which; a node that leads does so until it ends (supervisor.py). The ranks of
a follower carry out the leader's commands, which come by way of the coordinator. Must not import
torch: the daemon imports this file.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.errors import LightRLError, ProtocolError, TrainerError
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.message import Message
from lightrl.messages.sharing import SetDevices
from lightrl.messages.trainers import TrainerRelay, TrainerSet
from lightrl.messages.training import TrainShard
from lightrl.system.child import ChildDied
from lightrl.system.threads import in_thread
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.followers import FRAMES, RankFrame
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    RankEvent,
    RankFailed,
    RankStarted,
    StartRank,
    StepFinished,
)
from lightrl.trainer.rank_processes import STOP_S, Place, Rank, start_rank
from lightrl.trainer.saves import Saves
from lightrl.trainer.supervisor import Trainer

logger = logging.getLogger(__name__)

SEEN_S = 10.0  # until a file that one machine has written is visible on another
LOOK_S = 0.2


class FollowerNode:
    """Runs the ranks of one life after the other. Has the members of `Trainer` that a daemon
    uses."""

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
        self._life = ""  # of the ranks here; "" = none
        self._ranks: dict[int, Rank] = {}
        self._readers: list[asyncio.Task[None]] = []
        # with the names of their leaders; None: leave when the present life ends
        self._frames: asyncio.Queue[tuple[str, RankFrame] | None] = asyncio.Queue()

    def set_leader(self, leader: str) -> None:
        """Follow this node; "" = none, without which the ranks here only wait for others."""
        if not leader:
            self._frames.put_nowait(("", RankFrame("", 0)))
        self._leader = leader

    def handle(self, message: object) -> None:
        if isinstance(message, SetDevices) and not message.active:
            self.devices.ask(message.number)

    def pause(self) -> None:
        self.devices.forget_orders()

    def rejoin(self) -> None:
        """The leader decides."""

    async def close(self) -> None:
        """Do nothing: this node serves no versions."""

    def stop(self) -> None:
        """Leave when the leader has ended the present life."""
        self._frames.put_nowait(None)

    def receive(self, relay: TrainerRelay) -> None:
        try:
            self._frames.put_nowait((relay.node, FRAMES.decode(relay.frame)))
        except ProtocolError as e:
            logger.warning("%s: %s", relay.node, e)

    async def run(self) -> None:
        """Run until it is stopped. When cancelled, no rank is left."""
        is_stopping = False
        try:
            while self._life or not is_stopping:
                if (item := await self._frames.get()) is None:
                    is_stopping = True
                else:
                    await self._carry_out(*item)
        finally:
            await self._end()

    async def _carry_out(self, leader: str, message: RankFrame) -> None:
        number = message.rank
        if not message.frame:
            if message.life in ("", self._life):
                await self._end()
            return
        is_known = message.life == self._life and number in self._ranks
        if is_known and not self.devices.are_shared:
            self._ranks[number].forward(message.frame)
            return
        command = RANK_COMMANDS.decode(message.frame)
        if isinstance(command, StartRank):
            if message.life != self._life:
                await self._end()
                self._leader, self._life = leader, message.life
                self.devices.starting()
            await self._start(command)
        elif is_known:
            self.devices.on_command(command)
            self._ranks[number].forward(message.frame)

    async def _start(self, command: StartRank) -> None:
        place, number = self._place, command.rank
        try:
            if not await _sees(Path(command.rendezvous)):
                folder = Path(command.rendezvous).parent
                raise TrainerError(
                    f"does not see {folder}: checkpoint.dir must be a folder that all trainer "
                    "nodes see"
                )
            here = replace(
                command,
                host=place.host,
                nccl_host=place.host if command.nccl_host else "",
                publish_dir=str(place.publish_dir),
            )
            local = number % self._config.train.ranks
            rank = self._ranks[number] = await start_rank(self._config, place, here, local)
        except (LightRLError, OSError) as e:
            self._report(number, RankFailed(str(e), isinstance(e, LightRLError)))
            return
        self._readers.append(asyncio.create_task(self._relay_events(number, rank)))

    async def _relay_events(self, number: int, rank: Rank) -> None:
        while True:
            try:
                event = await rank.receive()
            except LightRLError as e:
                self._report(number, RankFailed(str(e), not isinstance(e, ChildDied)))
                return
            self.devices.on_event(number, event)
            if isinstance(event, RankStarted | StepFinished):
                self.devices.announce()
                self.devices.published()
            self._report(number, event)

    def _report(self, number: int, event: RankEvent) -> None:
        if self._leader:
            frame = FRAMES.encode(RankFrame(self._life, number, RANK_EVENTS.encode(event)))
            self._send(TrainerRelay(self._leader, frame))

    async def _end(self) -> None:
        """Kill the ranks: those that are left of a life hang in a collective."""
        if not self._life:
            return
        for reader in self._readers:
            reader.cancel()
        for rank in self._ranks.values():
            rank.kill()
        await asyncio.gather(*(rank.stop(STOP_S) for rank in self._ranks.values()))
        self._life = ""
        self._readers.clear()
        self._ranks.clear()
        self.devices.lost()


class TrainerNode:
    def __init__(
        self,
        name: str,
        follower: FollowerNode,
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

    @property
    def role(self) -> Trainer | FollowerNode:
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
            self._follower.set_leader("")
            self._follower.stop()
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
        await self._follower.run()
        if self._trainer is not None:
            await self._trainer.run()

    async def close(self) -> None:
        await self.role.close()


async def _sees(file: Path) -> bool:
    """Return whether this file exists within SEEN_S."""
    deadline = time.monotonic() + SEEN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if await in_thread(file.exists):
                return True
        await asyncio.sleep(LOOK_S)
    return False
