"""An engine of two workers, each a process of its own (vLLM), as a member of a broadcast group.

Such a worker cannot be told meanwhile that what it receives is not wanted any more.
"""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrl.engine.base import DropBroadcast, EngineSpec
from lightrl.system.child import ChildDied
from tests.engine.conftest import MAX_LENGTH, EngineClient, Origins, TinyModel
from tests.engine.test_broadcast import (
    answer,
    assert_serves_nothing,
    rank,
    receive,
    served,
)

pytestmark = pytest.mark.e2e

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
WORLD = 3  # with one rank
STOP_S = 5.0


@pytest.fixture(scope="module")
def two(
    tiny: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
    origin_of_engines: Origins,
) -> Iterator[EngineClient]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    spec = EngineSpec("vllm", str(tiny.dir), "float32", MAX_LENGTH, 16, engine_args=TWO)
    with asyncio.Runner() as runner:
        with origin_of_engines.forking("vllm"):
            client = EngineClient(runner, spec, tiny, tmp_path_factory.mktemp("two") / "log")
        yield client
        runner.run(client.child.stop(STOP_S))  # the last test has killed it


def test_both_workers_get_what_a_file_leaves(two, ask, tiny):
    two.load(2)
    expected = served(two, ask, 2, "file-")
    two.load(1)
    assert served(two, ask, 1, "other-") != expected
    with rank(world=WORLD) as one:
        two.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2])
        assert answer(two).policy_version == 2
        assert served(two, ask, 2, "group-") == expected


@pytest.mark.parametrize("how", ["rank goes", "rank is stopped"])
def test_what_is_not_wanted_ends_with_the_group_or_when_nothing_moves(two, ask, tiny, how):
    """Each worker notices the end by itself, or the time limit ends it."""
    with rank(timeout_s=4.0, world=WORLD) as one:
        two.child.send(receive(one, tiny.files[2]))
        if how == "rank is stopped":
            one.send(tiny.files[2], signal=signal.SIGSTOP)
        else:
            one.send(tiny.files[2], waits=True)
            assert one.says() == "waits"
        two.child.send(DropBroadcast())
        if how == "rank goes":
            one.process.kill()
        failed = answer(two)
        assert (failed.policy_version, failed.is_dropped) == (2, True)
    assert_serves_nothing(two, ask, 2)
    two.load(1)
    assert len(served(two, ask, 1, f"{how}-")) > 0


def test_a_worker_that_dies_alone_ends_its_engine(two, tiny):
    two.load(1)
    with rank(timeout_s=60.0, world=WORLD) as one:
        two.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2], waits=True)
        assert one.says() == "waits"
        os.kill(workers(two.child.pid)[1], signal.SIGKILL)
        with pytest.raises(ChildDied):
            answer(two)


def workers(engine: int) -> list[int]:
    """The processes of its workers."""
    found: list[int] = []
    for task in Path(f"/proc/{engine}/task").iterdir():
        children = map(int, (task / "children").read_text().split())
        found += [c for c in children if "Worker" in Path(f"/proc/{c}/comm").read_text()]
    assert len(found) == 2
    return sorted(found)
