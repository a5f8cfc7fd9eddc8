"""The trainer role of a daemon where several nodes train together: it leads, or it follows.

Owns which of the two this node is, by the word of the coordinator: once it leads it does so until
it ends. What a leader does is in supervisor.py, what a follower does in follower.py. Must not
import torch: the daemon imports this file.
"""

import asyncio
from collections.abc import Callable

from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.sharing import AssignDevices, SuspendTrainer
from lightrl.messages.trainers import TrainerRelay, TrainerSet
from lightrl.messages.training import TrainShard
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.nodes.follower import Follower
from lightrl.trainer.saves import Saves
from lightrl.trainer.supervisor import Trainer


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
        self._trainer: Trainer | None = None  # that leads
        self._is_stopping = False
        self._settled = asyncio.Event()  # it leads, or is to stop

    @property
    def leads(self) -> bool:
        return self._trainer is not None

    @property
    def devices(self) -> NodeDevices:
        return (self._trainer or self._follower).devices

    @property
    def device(self) -> str:
        return self._trainer.device if self._trainer is not None else ""

    @property
    def saves(self) -> Saves | None:
        return self._trainer.saves if self._trainer is not None else None

    @property
    def all_steps_done(self) -> bool:
        return self._trainer is not None and self._trainer.all_steps_done

    def handle(
        self,
        message: TrainShard
        | VersionTaken
        | AssignDevices
        | SuspendTrainer
        | TrainerSet
        | TrainerRelay,
    ) -> None:
        match message:
            case TrainerSet(leader, followers) if leader == self._name:
                self._lead().followers.told(followers)
            case TrainerSet(leader):
                if self._trainer is None:
                    self._follower.led_by(leader)
                elif leader:
                    self._leave(f"{leader} leads the trainer nodes now")
                else:
                    self._trainer.followers.told(())
            case TrainerRelay():
                if self._trainer is not None:
                    self._trainer.followers.hear(message)
                else:
                    self._follower.hear(message)
            case SuspendTrainer(number) if self._trainer is None:
                self._follower.devices.ask(number)
            case _:
                if self._trainer is not None:
                    self._trainer.handle(message)

    def _lead(self) -> Trainer:
        if self._trainer is None:
            self._trainer = self._new_trainer()
            if self._is_stopping:
                self._trainer.stop()
            self._settled.set()
        return self._trainer

    def pause(self) -> None:
        if self._trainer is not None:
            self._trainer.pause()
        else:
            self._follower.devices.forget_orders()

    def rejoin(self) -> None:
        if self._trainer is not None:
            self._trainer.rejoin()

    def break_off(self) -> None:
        """Messages of other trainer nodes may have been lost."""
        if self._trainer is not None:
            self._trainer.followers.break_off()
        else:
            self._follower.break_off()

    def stop(self) -> None:
        self._is_stopping = True
        if self._trainer is not None:
            self._trainer.stop()
        else:
            self._follower.stop()

    async def run(self) -> None:
        """Until it is to stop. Raises TrainerError if that is not in order."""
        following = asyncio.create_task(self._follower.run(), name="follower")
        settled = asyncio.create_task(self._settled.wait())
        try:
            await asyncio.wait({following, settled}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                return
        finally:
            for task in (following, settled):
                task.cancel()
            await asyncio.wait({following, settled})
        assert self._trainer is not None
        await self._trainer.run()

    async def close(self) -> None:
        if self._trainer is not None:
            await self._trainer.close()
