"""The trainer role of a daemon where several nodes train together: it leads, or it follows.

The coordinator decides which; a node that leads does so until it ends. supervisor.py has the
leader, follower.py the follower. Must not import torch: the daemon imports this file.
"""

import asyncio
from collections.abc import Callable

from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.sharing import Give, Park
from lightrl.messages.trainers import TrainerRelay, TrainerSet
from lightrl.messages.training import TrainShard
from lightrl.trainer.broadcasts import Order
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
        self._trainer: Trainer | None = None  # if this node leads
        self._is_stopping = False
        self._leads = asyncio.Event()

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
        self, message: TrainShard | VersionTaken | Give | Park | Order | TrainerSet | TrainerRelay
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
            case Park(number) if self._trainer is None:
                self._follower.devices.ask(number)
            case _:
                if self._trainer is not None:
                    self._trainer.handle(message)

    def _lead(self) -> Trainer:
        if self._trainer is None:
            self._trainer = self._new_trainer()
            if self._is_stopping:
                self._trainer.stop()
            self._leads.set()
        return self._trainer

    def pause(self) -> None:
        if self._trainer is not None:
            self._trainer.pause()
        else:
            self._follower.devices.forget_orders()

    def rejoin(self) -> None:
        if self._trainer is not None:
            self._trainer.rejoin()

    def disconnect(self) -> None:
        """Messages of other trainer nodes may have been lost."""
        if self._trainer is not None:
            self._trainer.followers.disconnect()
        else:
            self._follower.set_leader("")

    def stop(self) -> None:
        self._is_stopping = True
        (self._trainer or self._follower).stop()

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
        if self._trainer is not None:
            await self._trainer.close()
