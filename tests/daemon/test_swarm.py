"""Versions on their way between daemons that share no memory, each as if on a machine of its own,
while something happens. The trainer's line is slow, so that a pull takes a while."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.messages.snapshot import NodeRow, Snapshot
from lightrl.metrics import sinks
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.write import TensorBytes, write_version
from tests.support import daemons
from tests.support.daemons import Running, ScriptedTrainer, a_run
from tests.support.held_line import HeldLine

ALONE = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"')
WHY_NOT = "no mount namespaces here"
CAN_BE_ALONE = subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0

pytestmark = [
    pytest.mark.usefixtures("warm_daemons"),
    pytest.mark.skipif(not CAN_BE_ALONE, reason=WHY_NOT),
]

NUM_BUCKETS = 4
BYTES_PER_S = NUM_BUCKETS * BUCKET_BYTES / 2.0  # of the trainer's line: one version in two seconds


class SlowTrainer(ScriptedTrainer):
    """Of versions of several buckets; an incarnation that comes later writes the same ones."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._server = WeightServer()
        self.line = HeldLine.of(self._server, BYTES_PER_S, NUM_BUCKETS * BUCKET_BYTES // 2)


def several_buckets(folder: Path, version: int, salt: int = 0) -> VersionFile:
    data = b"".join(bytes([version, k]) * (BUCKET_BYTES // 2) for k in range(NUM_BUCKETS))
    tensor = TensorBytes("w", "uint8", (len(data),), memoryview(data))
    return write_version(folder / f"version_{version}.bin", version, [tensor])


@pytest.fixture(autouse=True)
def slow_trainer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemons, "ScriptedTrainer", SlowTrainer)
    monkeypatch.setattr(daemons, "uniform_version", several_buckets)


async def add_machine(run: Running, name: str) -> asyncio.subprocess.Process:
    """A rollout daemon with shared memory of its own."""
    join = ("--join", run.head.address, "--key", str(run.join_file))
    command = (*ALONE, sys.executable, "-m", "lightrl.cli", "up", *join, "--name", name)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    run.processes[name] = process
    return process


async def let_publish_to(run: Running, names: str, *, is_held: bool = False) -> None:
    """A machine for each name has the first version, and the trainer publishes the next one; until
    then the step is not over."""
    assert isinstance(run.trainer, SlowTrainer)
    run.trainer.may_publish.clear()
    for name in names:
        await add_machine(run, name)
    await run.until(lambda s: is_ready(s, *names))
    if is_held:
        run.trainer.line.hold()
    run.trainer.may_publish.set()


async def until_pulled_in_part(run: Running, names: str) -> HeldLine:
    """They have some of the next version, each, and none has all of it. Returns the line, which has
    the rest."""
    await let_publish_to(run, names, is_held=True)
    await run.until(lambda s: pulls(s, *names))
    assert isinstance(run.trainer, SlowTrainer)
    return run.trainer.line


def row(s: Snapshot, name: str) -> NodeRow | None:
    return next((n for n in s.nodes if n.name == name), None)


def is_ready(s: Snapshot, *names: str) -> bool:
    return all((r := row(s, n)) is not None and r.state == "ready" for n in names)


def pulls(s: Snapshot, *names: str) -> bool:
    """All of them have some of a version, and none has all of it."""
    rows = [row(s, n) for n in names]
    return all(
        r is not None and r.weights is not None and 0 < r.weights.num_bytes < r.weights.total_bytes
        for r in rows
    )


def test_nodes_get_a_version_from_each_other_and_metrics_say_how(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            await let_publish_to(run, "abc")
            await run.until_finished()
            assert run.head.succeeded
            version = NUM_BUCKETS * BUCKET_BYTES
            steps = [r for r in sinks.read(run.config.run_dir) if "reward/mean" in r]
            moved = sum(r.get("weights/bytes", 0.0) for r in steps)
            assert moved >= 3 * version
            assert sum(r.get("weights/from_peers", 0.0) for r in steps) > version / 2
            assert max(r.get("weights/pull_s", 0.0) for r in steps) > 0.5
            summary = json.loads((run.config.run_dir / "summary.json").read_bytes())
            assert summary["weights"]["bytes"] == moved
            assert summary["counters"]["bad_sources"] == summary["counters"]["weights_failed"] == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_who_comes_while_the_trainer_is_away_pulls_from_those_who_have_the_version(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            run.trainer.may_publish.clear()  # the step is never over
            await add_machine(run, "a")
            await run.until(lambda s: is_ready(s, "a"))
            run.training.cancel()
            await asyncio.gather(run.training, return_exceptions=True)
            await run.until(lambda s: row(s, "trainer") is None)
            await add_machine(run, "b")
            await run.until(lambda s: is_ready(s, "a", "b"))
            await run.replace_trainer(begins_at=0)
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())


@pytest.mark.e2e
def test_node_that_is_killed_while_it_relays_disturbs_nobody(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            line = await until_pulled_in_part(run, "abc")
            run.processes["b"].kill()
            line.free()
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())


@pytest.mark.e2e
def test_node_that_drains_in_the_middle_of_a_pull_disturbs_nobody(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            line = await until_pulled_in_part(run, "abc")
            run.processes["b"].terminate()
            line.free()
            assert await run.processes["b"].wait() == 0
            await run.until_finished()
            assert run.head.succeeded
            summary = json.loads((run.config.run_dir / "summary.json").read_bytes())
            assert summary["counters"]["nodes_lost"] == 0

    asyncio.run(scenario())


@pytest.mark.e2e
def test_coordinator_that_is_resumed_while_nodes_pull_lets_them_go_on(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as gone:
            await until_pulled_in_part(gone, "ab")
            await gone.silence()
            async with a_run(tmp_path, resume=True) as run:
                assert run.head.address == gone.head.address
                run.processes = gone.processes
                await run.until_finished()
                assert run.head.succeeded
                summary = json.loads((run.config.run_dir / "summary.json").read_bytes())
                assert summary["counters"]["weights_failed"] == 0

    asyncio.run(scenario())
