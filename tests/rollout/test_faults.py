"""What dies, hangs or is full while a version is on its way to an engine: nobody else is
disturbed, and what was proved is not pulled again."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrl.config.sections import Weights
from lightrl.messages.weights import WeightsFailed, WeightsReady, WeightsSource
from lightrl.rollout.state import EngineState
from lightrl.tickets import pull_ticket
from lightrl.weights.machine import scratch
from lightrl.weights.machine.store import Store
from lightrl.weights.version.layout import BUCKET_BYTES
from tests.rollout.test_pulls import pulling
from tests.rollout.test_weights import (
    BUCKETS_A_S,
    SIZE,
    begun,
    holding,
    node,
    pulling_process,
    until,
)
from tests.support.daemons import published
from tests.support.tiers import e2e
from tests.support.versions import make_version, serving, source


@pytest.mark.parametrize("how", [signal.SIGKILL, *e2e([signal.SIGSTOP])], ids=["killed", "stopped"])
def test_a_peer_that_relays_dies_or_hangs(tmp_path: Path, how: signal.Signals):
    """The other machine has the rest from the trainer, and no whole bucket twice."""
    file = make_version(tmp_path / "v1.bin", 1, *SIZE)

    async def scenario() -> None:
        async with (
            serving(file, max_bytes_per_s=BUCKETS_A_S) as trainer,
            node("b", tmp_path / "other machine") as b,
        ):
            offer = published(file, (source(trainer, "a", 1),))
            with pulling_process(tmp_path, offer) as process:
                peer = await said_by(process)
                to_b = source(trainer, "b", 1)
                b.weights.offer(published(file, (peer("b"), to_b)))
                getting = asyncio.create_task(b.got(file))
                # The peer is not held back: it may have sent all of it between two looks.
                await until(lambda: begun(b) or getting.done())
                process.send_signal(how)
                fetched = await getting
                twice = fetched.stats.num_bytes - file.num_bytes
                assert 0 <= twice < Weights().streams * BUCKET_BYTES

    asyncio.run(scenario())


@pytest.mark.e2e
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_daemon_that_was_killed_finds_what_was_proved_when_it_starts_again(
    tmp_path: Path, is_whole: bool
):
    file = make_version(tmp_path / "v1.bin", 1, *SIZE)

    async def scenario() -> None:
        async with holding(file) as (trainer, line):
            offer = published(file, (source(trainer, "a", 1),))
            with pulling_process(tmp_path, offer) as process:
                await said_by(process)
                if is_whole:
                    line.free()
                    name = Store(str(tmp_path).encode())._name
                    here = scratch.roots()[0] / name / f"{file.digest}.bin"
                    await until(here.exists)
                process.kill()
                process.wait()
            line.free()
            async with node("a", tmp_path) as again:
                again.offer(file, trainer)
                num_bytes = (await again.got(file)).stats.num_bytes
                assert num_bytes == 0 if is_whole else 0 < num_bytes < file.num_bytes

    asyncio.run(scenario())


async def said_by(process: "subprocess.Popen[str]"):
    """The source that a pulling process is, as a node is told of it."""
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    word, address, secret = line.split()
    assert word == "begun"
    return lambda to: WeightsSource("a", (address,), pull_ticket(secret, to, 1))


@pytest.mark.parametrize("how", ["killed", *e2e(["stopped"])])
def test_an_engine_dies_or_hangs_while_it_loads(tmp_path: Path, how: str):
    """The next one gets the same file, which was proved."""
    one, two = (make_version(tmp_path / f"v{v}.bin", v, 2, 1 << 20) for v in (1, 2))

    async def scenario() -> None:
        async with (
            serving(one, two) as trainer,
            pulling(tmp_path, patience_s=2.0 if how == "stopped" else 600.0) as node,
        ):
            node.offer(one, trainer)
            await node.ready()
            engine = node.rollout._engine
            assert engine is not None
            os.kill(engine.pid, signal.SIGSTOP)
            node.offer(two, trainer)
            await until(lambda: node.rollout.state is EngineState.LOADING)
            if how == "killed":
                os.kill(engine.pid, signal.SIGKILL)
            failed = await node.said.get()
            assert isinstance(failed, WeightsFailed)
            assert failed.policy_version == 2
            node.offer(two, trainer)
            ready = await node.ready()
            assert (ready.policy_version, ready.num_bytes) == (2, 0)

    asyncio.run(scenario())


@contextlib.contextmanager
def memory_of(size: int, path: Path) -> Iterator[Path]:
    """Shared memory of its own."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_shared_memory_that_is_filled_during_a_pull_is_left_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The pull has failed, in one line; when the version is offered again, it comes to the disk."""
    file = make_version(tmp_path / "v1.bin", 1, *SIZE)
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(scratch, "_disk", lambda: disk)

    async def scenario(memory: Path) -> None:
        async with holding(file) as (trainer, line), node("a", tmp_path) as a:
            a.offer(file, trainer)
            await until(lambda: begun(a))
            assert a.folder.is_relative_to(memory)
            fill(memory / "of others")
            line.free()
            failed = await a.said.get()
            assert isinstance(failed, WeightsFailed)
            assert "No space left" in failed.reason
            assert "\n" not in failed.reason
            a.offer(file, trainer)
            fetched = await a.got(file)
            assert Path(fetched.file.path).is_relative_to(disk)
            assert not list(a.folder.glob("*.part"))

    with memory_of(4 * file.num_bytes, tmp_path / "shm") as memory:
        monkeypatch.setattr(scratch, "_shared", lambda: memory)
        asyncio.run(scenario(memory))
    assert len([line for line in caplog.messages if "are on disk" in line]) == 1


def test_a_disk_that_is_full_too_is_a_failed_version_and_the_engine_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one, two = (make_version(tmp_path / f"v{v}.bin", v, 2, 1 << 20) for v in (1, 2))

    async def scenario(memory: Path) -> None:
        async with serving(one, two) as trainer, pulling(tmp_path) as node:
            node.offer(one, trainer)
            await node.ready()
            fill(memory / "of others")
            for _ in range(2):
                node.offer(two, trainer)
                failed = await node.said.get()
                assert isinstance(failed, WeightsFailed)
                assert failed.reason.startswith("no room for 0.0021 GB: ")
            assert node.rollout.serves == (1, one.digest)
            (memory / "of others").unlink()
            node.offer(two, trainer)
            assert isinstance(await node.ready(), WeightsReady)

    with memory_of(256 << 20, tmp_path / "shm") as memory:
        monkeypatch.setattr(scratch, "_shared", lambda: memory)
        monkeypatch.setattr(scratch, "_disk", lambda: memory)
        asyncio.run(scenario(memory))


def fill(path: Path) -> None:
    """Until nothing more fits."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
