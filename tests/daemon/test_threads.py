"""A daemon on a machine that has no thread to spare for a while: nothing ends because of that."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightrl.coordinator.history_sync import Histories
from lightrl.daemon.connection import NodeConnection
from lightrl.daemon.main import DaemonOptions
from lightrl.errors import LightRLError
from lightrl.history.saved import SavedHistory
from lightrl.history.store import History
from lightrl.launch import run
from lightrl.launch.slurm import job
from lightrl.messages.message import Message
from lightrl.messages.weights import WeightsReady
from lightrl.metrics.rounds import digest_responses, in_thread
from lightrl.model_files import model_files
from lightrl.system import child
from tests.rollout.test_pulls import pulling
from tests.support.daemons import DEADLINE_S, a_run, make_config
from tests.support.versions import make_version, serving

pytestmark = pytest.mark.usefixtures("warm_daemons")

NO_THREAD = "can't start new thread"
# what their threads are named, in threads.py and in asyncio
OF_CALLS = ("ThreadPoolExecutor", "asyncio_")


@pytest.fixture
def lack(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """From its call on, threads are refused whose name begins so; returns the names of those that
    were."""
    start, refused = threading.Thread.start, []

    def begin(*names: str, times: int = 1 << 30) -> list[str]:
        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith(names) and len(refused) < times:
                refused.append(thread.name)
                raise RuntimeError(NO_THREAD)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        monkeypatch.setattr(child, "START_AGAIN_S", 0.01)
        return refused

    return begin


def test_a_node_that_has_no_thread_for_a_while_serves_all_versions(tmp_path: Path, lack):
    files = [make_version(tmp_path / f"v{v}.bin", v, 2, 1 << 20) for v in (1, 2)]

    async def scenario() -> None:
        async with serving(*files) as trainer, pulling(tmp_path) as node:
            for file in files:
                refused = lack(*OF_CALLS, times=2)
                node.offer(file, trainer)
                said: Message | None = None
                while not isinstance(said, WeightsReady):
                    said = await node.said.get()
                assert said.policy_version == file.policy_version
                assert len(refused) == 2

    asyncio.run(scenario())


def test_a_node_waits_for_a_thread_to_look_for_devices_in(tmp_path: Path, lack, caplog):
    config = make_config(tmp_path)
    connection = NodeConnection(DaemonOptions("a", ("rollout",)), "tcp://127.0.0.1:1")
    lack(*OF_CALLS, times=2)
    found = asyncio.run(connection._find_gpus(config, model_files(config.model.path)))
    assert len(found.engines) <= 1
    [line] = [line for line in caplog.messages if NO_THREAD in line]
    assert line == f"the search for devices cannot be started: {NO_THREAD}; trying again"


def test_a_whole_run_waits_for_that_thread_too(tmp_path: Path, lack, monkeypatch, capsys):
    def enough(*_: object) -> None:
        raise LightRLError("far enough")

    monkeypatch.setattr(run, "never_fail", lambda: None)
    monkeypatch.setattr(run, "configure_file", lambda *_: None)
    monkeypatch.setattr(run, "LocalRun", enough)
    refused = lack(*OF_CALLS, times=2)
    with pytest.raises(LightRLError, match="far enough"):
        asyncio.run(run.run_here(make_config(tmp_path), tui=False))
    assert len(refused) == 2
    assert f"{NO_THREAD}; trying again" in capsys.readouterr().out


def test_a_node_leaves_in_order_without_a_thread_that_would_end_it_by_force(tmp_path: Path, lack):
    async def scenario() -> None:
        async with a_run(tmp_path) as running:
            running.trainer.may_publish.clear()  # the run is not over before "a" is there
            options = DaemonOptions("b", ("rollout",), key=running.key)
            connection = NodeConnection(options, running.head.address)
            working = asyncio.create_task(connection.run())
            await running.until(
                lambda s: any(n.name == "b" and n.state == "ready" for n in s.nodes)
            )
            refused = lack("Thread-")  # as timers are named
            connection.drain("enough")
            async with asyncio.timeout(DEADLINE_S):
                await working
            assert refused
            lack("nothing")
            running.trainer.may_publish.set()
            await running.add_rollout("a")
            await running.until_finished()
            assert running.head.succeeded

    asyncio.run(scenario())


def test_a_job_asks_again_where_the_run_is(lack):
    async def scenario(address: str) -> None:
        lack(*OF_CALLS, times=1)
        assert [await job._answers(address) for _ in range(2)] == [False, True]

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(scenario(f"tcp://127.0.0.1:{listening.getsockname()[1]}"))


def test_a_coordinator_ends_in_order_and_hashes_and_saves_what_it_can(tmp_path: Path, lack):
    lines: list[str] = []
    lack("")
    saved = SavedHistory(tmp_path, History(), lines.append)
    saved.append([])
    assert lines == [
        f"WARNING: history.bin: not saved any more ({NO_THREAD}): a resume will draft less",
    ]
    asyncio.run(Histories(History(), saved).close())
    hashed = in_thread(ThreadPoolExecutor(1), digest_responses, 3, [])
    assert hashed.result(0) == digest_responses(3, [])
