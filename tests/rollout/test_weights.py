"""The versions of one machine: pulled once, by whichever node is in turn, proved by each."""

import asyncio
import contextlib
import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lightrl.config.sections import Weights
from lightrl.messages.message import Message
from lightrl.messages.weights import PublishWeights, WeightsFailed
from lightrl.rollout.fetched import Fetched
from lightrl.rollout.weights import Callbacks, NodeWeights
from lightrl.weights.machine import scratch, store
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import VersionFile
from tests.support.daemons import DEADLINE_S, published
from tests.support.held_line import HeldLine
from tests.support.tiers import e2e
from tests.support.versions import make_version, serving, source

SIZE = (6, BUCKET_BYTES)
BUCKETS_A_S = 4 * BUCKET_BYTES  # a pull of SIZE takes more than a second
HELD_FROM = 3 * BUCKET_BYTES  # half of SIZE


class Node:
    """One node of a machine, without an engine: what comes here is taken as if it was loaded."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.store, self.server = Store(str(folder).encode()), WeightServer()
        self.store.open()
        self.weights = NodeWeights(
            name,
            Weights(),
            self.store,
            self.server,
            "127.0.0.1",
            Callbacks(
                self.said.put_nowait,
                lambda: None,
                lambda offer, reason: None,
            ),
        )

    def offer(self, file: VersionFile, *holders: WeightServer) -> PublishWeights:
        sources = tuple(
            source(h, self.name, file.policy_version, name=f"holder-{i}")
            for i, h in enumerate(holders)
        )
        self.weights.offer(offer := published(file, sources))
        return offer

    async def got(self, file: VersionFile) -> Fetched:
        fetched = await self.weights.next()
        assert isinstance(fetched, Fetched)
        assert filecmp.cmp(fetched.file.path, file.path, shallow=False)
        assert fetched.file.policy_version == file.policy_version
        return fetched

    @property
    def folder(self) -> Path:
        return self.store.control


@contextlib.asynccontextmanager
async def node(name: str, folder: Path) -> AsyncIterator[Node]:
    one = Node(name, folder)
    await one.server.start("127.0.0.1")
    running = asyncio.create_task(one.weights.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await one.weights.close()
        await one.server.close()
        one.store.close()


@contextlib.asynccontextmanager
async def holding(file: VersionFile) -> AsyncIterator[tuple[WeightServer, HeldLine]]:
    """A trainer that serves half of a version of SIZE, and the rest once its line is free."""
    async with serving(file) as trainer:
        line = HeldLine.of(trainer, BUCKETS_A_S, HELD_FROM)
        line.hold()
        yield trainer, line


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


def begun(one: Node) -> bool:
    return (one.weights.progress is not None) and one.weights.progress.num_bytes > 0


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Of this machine: (shared memory, disk); both have room for everything."""
    both = tmp_path / "shm", tmp_path / "disk"
    for root in both:
        root.mkdir()
    monkeypatch.setattr(scratch, "_shared", lambda: both[0])
    monkeypatch.setattr(scratch, "_disk", lambda: both[1])
    return both


def test_the_nodes_of_a_machine_pull_a_version_once(tmp_path: Path):
    file = make_version(tmp_path / "v1.bin", 1, *SIZE)

    async def scenario() -> None:
        async with (
            serving(file, max_bytes_per_s=BUCKETS_A_S) as trainer,
            node("a", tmp_path) as a,
            node("b", tmp_path) as b,
            node("c", tmp_path) as c,
        ):
            nodes = (a, b, c)
            for one in nodes:
                one.offer(file, trainer)
            fetched = [await one.got(file) for one in nodes]
            assert sorted(f.stats.num_bytes for f in fetched) == [0, 0, file.num_bytes]
            assert len({f.file.path for f in fetched}) == 1
            assert len(list(a.folder.glob("*.bin*"))) == 1

    asyncio.run(scenario())


def test_another_node_goes_on_where_the_one_that_pulled_has_gone(tmp_path: Path):
    file = make_version(tmp_path / "v1.bin", 1, *SIZE)

    async def scenario() -> None:
        async with holding(file) as (trainer, line), node("b", tmp_path) as b:
            async with node("a", tmp_path) as a:
                a.offer(file, trainer)
                await until(lambda: begun(a))
                b.offer(file, trainer)
                await asyncio.sleep(3 * store.POLL_S)
                assert b.weights.progress is None  # it waits
            line.free()
            fetched = await b.got(file)
            assert 0 < fetched.stats.num_bytes < file.num_bytes

    asyncio.run(scenario())


PULLER = """
import asyncio, sys
import msgspec
from pathlib import Path
from lightrl.messages.weights import PublishWeights
from tests.rollout.test_weights import begun, node

async def main():
    async with node("a", Path(sys.argv[1])) as a:
        a.weights.offer(msgspec.json.decode(sys.argv[2], type=PublishWeights))
        while not begun(a):
            await asyncio.sleep(0.01)
        print("begun", *a.server.addresses, a.server.secret, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def pulling_process(folder: Path, offer: PublishWeights):
    """Another daemon of this machine, which has got the first buckets of a version."""
    arguments = (str(folder), msgspec.json.encode(offer).decode())
    command = (sys.executable, "-c", PULLER, *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.e2e
def test_what_a_killed_daemon_has_pulled_for_its_machine_is_not_pulled_again(tmp_path: Path):
    file = make_version(tmp_path / "v1.bin", 1, *SIZE)

    async def scenario() -> None:
        async with holding(file) as (trainer, line), node("b", tmp_path) as b:
            offer = published(file, (source(trainer, "a", 1),))
            with pulling_process(tmp_path, offer) as process:
                assert process.stdout is not None
                assert (await asyncio.to_thread(process.stdout.readline)).startswith("begun")
                process.kill()
                line.free()
                b.offer(file, trainer)
                fetched = await b.got(file)
                assert fetched.stats.num_bytes < file.num_bytes

    asyncio.run(scenario())


def test_a_file_of_the_trainer_is_loaded_where_it_lies_and_stays_until_then(tmp_path: Path):
    one, two = (make_version(tmp_path / f"v{v}.bin", v, 2, 1 << 20) for v in (1, 2))

    def is_locked(file: VersionFile) -> bool:
        descriptor = os.open(file.path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    async def scenario() -> None:
        trainer = Store(str(tmp_path).encode())
        trainer.open()
        async with serving(one, two) as server, node("a", tmp_path) as a:
            for file in (one, two):
                trainer.point(file)
                a.offer(file, server)
                fetched = await a.got(file)
                assert (fetched.stats.num_bytes, fetched.file.path) == (0, file.path)
                await server.retire(file.digest)
                assert is_locked(file)
            assert not list(a.folder.glob("*.bin*"))
            await until(lambda: not is_locked(one))
        trainer.close()
        assert not is_locked(two)

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["pointed to", *e2e(["in the folder"])])
def test_what_lies_here_is_proved_all_the_same(tmp_path: Path, where: str, caplog):
    file = make_version(tmp_path / "v1.bin", 1, *SIZE)
    false = make_version(tmp_path / "false.bin", 1, *SIZE)
    with Path(false.path).open("r+b") as data:
        data.seek(false.num_bytes - 3)
        data.write(b"lie")

    async def scenario() -> None:
        async with serving(file) as trainer, node("a", tmp_path) as a:
            if where == "pointed to":
                a.store.point(false)
            else:
                here = a.folder / f"{file.digest}.bin"
                shutil.copy(false.path, here)
                shutil.copy(file.manifest_path, here.with_suffix(".manifest"))
            a.offer(file, trainer)
            assert (await a.got(file)).stats.num_bytes == file.num_bytes

    asyncio.run(scenario())
    [line] = [line for line in caplog.messages if "digest differs" in line]
    assert "bucket 5" in line


def test_the_next_version_comes_while_one_is_loaded_and_what_nobody_wants_goes(tmp_path: Path):
    files = [make_version(tmp_path / f"v{v}.bin", v, 2, 1 << 20) for v in range(1, 5)]

    def here(one: Node) -> set[str]:
        return {path.name.partition(".")[0] for path in one.folder.glob("*.bin")}

    async def scenario() -> None:
        async with (
            serving(*files) as trainer,
            node("a", tmp_path) as a,
            node("b", tmp_path) as b,
        ):
            a.offer(files[0], trainer)
            b.offer(files[0], trainer)
            await asyncio.gather(a.got(files[0]), b.got(files[0]))  # and it is being loaded
            for file in files[1:]:
                a.offer(file, trainer)
                await until(lambda file=file: file.digest in here(a))
                await a.got(file)
            await until(lambda: here(a) == {files[0].digest, files[-1].digest})  # b has the first

    asyncio.run(scenario())


def test_weights_that_a_step_left_as_they_were_are_loaded_as_the_next_version(tmp_path: Path):
    """Also if they come while the engine still loads them as the version before."""
    first = make_version(tmp_path / "v1.bin", 1, *SIZE)
    second = replace(first, policy_version=2)

    async def scenario() -> None:
        async with serving(first) as trainer, node("a", tmp_path) as a:
            a.offer(first, trainer)
            await a.got(first)
            a.offer(second, trainer)
            await a.got(second)
            a.offer(second, trainer)  # again, while it is being loaded: not once more
            a.weights.loaded()
            assert not a.weights.is_next.is_set()

    asyncio.run(scenario())


@pytest.mark.parametrize("has_disk", [True, False])
def test_full_shared_memory_is_left_for_the_disk(
    tmp_path: Path, roots: tuple[Path, Path], monkeypatch, caplog, has_disk: bool
):
    """Asked anew for each version; if the disk is full, too, the version has failed and no more."""
    files = [make_version(tmp_path / f"v{v}.bin", v, 2, 1 << 20) for v in (1, 2, 3)]
    room = dict.fromkeys(roots, 1 << 40)
    monkeypatch.setattr(scratch, "free_bytes", lambda root: room[root])

    async def scenario() -> None:
        async with serving(*files) as trainer, node("a", tmp_path) as a:
            a.offer(files[0], trainer)
            assert Path((await a.got(files[0])).file.path).is_relative_to(roots[0])
            room[roots[0]] = 1 << 20
            room[roots[1]] = 1 << 40 if has_disk else 0
            a.offer(files[1], trainer)
            if has_disk:
                assert Path((await a.got(files[1])).file.path).is_relative_to(roots[1])
            else:
                said = await a.said.get()
                assert isinstance(said, WeightsFailed)
                assert said.reason == (
                    f"no room for 0.0021 GB: 0.00105 GB free in {roots[0]}, 0 GB free in {roots[1]}"
                )
            room[roots[0]] = 1 << 40
            a.offer(files[2], trainer)
            assert Path((await a.got(files[2])).file.path).is_relative_to(roots[0])

    asyncio.run(scenario())
    lines = [line for line in caplog.messages if "are on disk" in line]
    assert len(lines) == has_disk


def test_memory_must_have_room_for_all_that_a_machine_holds_at_a_time(
    tmp_path: Path, roots: tuple[Path, Path], monkeypatch
):
    one = Store(b"x")
    one.open()
    free = dict.fromkeys(roots, 1 << 40)
    monkeypatch.setattr(scratch, "free_bytes", lambda root: free[root])
    size = 100 << 20
    for shared, wanted in ((3 * size, 0), (3 * size - 1, 1)):
        free[roots[0]] = shared
        assert one._place("d.bin", size).is_relative_to(roots[wanted])
    # one of the three is here already
    (one.control / "c.bin").write_bytes(bytes(size))
    free[roots[0]] = 2 * size
    assert one._place("d.bin", size).is_relative_to(roots[0])
    one.close()
