"""A rollout role that is cancelled ends, whatever happens in the same turn."""

import asyncio
from pathlib import Path

import pytest

from lightrl.rollout.agent import RolloutAgent
from lightrl.system.child import ChildDied
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer
from tests.support.daemons import DEADLINE_S, QUICKSTART, make_config


class Dying(RolloutAgent):
    """Its engine dies again and again; at the third time the role is cancelled in the same turn."""

    num_started = 0
    task: "asyncio.Task[None]"

    async def _serve(self) -> None:
        self.num_started += 1
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._die())

    async def _die(self) -> None:
        await asyncio.sleep(0)  # as a daemon does: the group waits for its tasks already
        if self.num_started == 3:
            self.task.cancel()
        raise ChildDied("killed by SIGKILL")


def test_a_cancel_in_the_turn_in_which_the_engine_dies_is_not_lost(tmp_path: Path):
    places = (QUICKSTART / "model", None)
    address = "tcp://127.0.0.1:1"

    async def scenario() -> int:
        weights = (Store(b"unused"), WeightServer())
        role = Dying(
            "a", make_config(tmp_path), 4, *places, address, lambda message: None, *weights
        )
        async with asyncio.timeout(DEADLINE_S):
            role.task = asyncio.create_task(role.run())
            with pytest.raises(asyncio.CancelledError):
                await role.task
        return role.num_started

    assert asyncio.run(scenario()) == 3
