"""A rollout role that is cancelled ends, whatever happens in the same turn."""

import asyncio
from pathlib import Path

import pytest

from lightrl.rollout.agent import RolloutAgent
from lightrl.system.child import ChildDied
from tests.support.daemons import DEADLINE_S, QUICKSTART, make_config


class Dying(RolloutAgent):
    """Its engine dies as soon as the role is cancelled."""

    num_started = 0

    async def _serve(self) -> None:
        self.num_started += 1
        me = asyncio.current_task()
        assert me is not None

        async def die() -> None:
            me.cancel()
            raise ChildDied("killed by SIGKILL")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(die())
            await asyncio.Event().wait()


def test_a_cancel_in_the_turn_in_which_the_engine_dies_is_not_lost(tmp_path: Path):
    places = (QUICKSTART / "model", tmp_path, None)
    address = "tcp://127.0.0.1:1"

    async def scenario() -> int:
        role = Dying("a", make_config(tmp_path), 4, *places, address, lambda message: None)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(role.run())
        return role.num_started

    assert asyncio.run(scenario()) == 1
