"""A rollout role that is cancelled ends, whatever happens in the same turn, and leaves nothing."""

import asyncio
import fcntl
import threading
from pathlib import Path

import pytest

from lightrl.rollout.agent import RolloutAgent
from lightrl.rollout.engine_spec import RolloutOptions
from lightrl.system.child import ChildDied
from lightrl.weights.machine import store
from lightrl.weights.machine.local import LocalVersion
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer
from tests.rollout.test_weights import node, until
from tests.support.daemons import DEADLINE_S, QUICKSTART, make_config
from tests.support.versions import make_version, serving


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
    options = RolloutOptions("a", 4, QUICKSTART / "model", "tcp://127.0.0.1:1")

    async def scenario() -> int:
        weights = (Store(b"unused"), WeightServer())
        role = Dying(options, make_config(tmp_path), lambda message: None, *weights)
        async with asyncio.timeout(DEADLINE_S):
            role.task = asyncio.create_task(role.run())
            with pytest.raises(asyncio.CancelledError):
                await role.task
        return role.num_started

    assert asyncio.run(scenario()) == 3


def test_a_version_that_is_proved_when_another_one_is_wanted_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else whoever made it could never write to its file again."""
    first, second = (make_version(tmp_path / f"v{v}.bin", v, 2, 1 << 20) for v in (1, 2))
    proved, may_go_on = threading.Event(), threading.Event()
    prove = store.verify_version

    def prove_slowly(version: LocalVersion, is_ended: threading.Event) -> None:
        prove(version, is_ended)
        if version.file.digest == first.digest:
            proved.set()
            may_go_on.wait()

    monkeypatch.setattr(store, "verify_version", prove_slowly)

    async def scenario() -> None:
        async with serving(second) as trainer, node("a", tmp_path) as a:
            a.store.point(first)
            a.offer(first, trainer)
            await until(proved.is_set)
            a.offer(second, trainer)
            await a.got(second)
            may_go_on.set()
            await until(lambda: not is_wanted(Path(first.path)))

    asyncio.run(scenario())


def is_wanted(path: Path) -> bool:
    """Somebody holds a lock on it, shared or not."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # swept: nobody wants it
        pass
    return False
