"""What a rollout node does with the versions that it is offered: with an engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightrl.messages.message import Message
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.weights import WeightsReady
from lightrl.rollout import weights
from lightrl.rollout.agent import RolloutAgent
from lightrl.rollout.engine_spec import RolloutOptions
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile
from tests.rollout.test_weights import until
from tests.support.daemons import DEADLINE_S, QUICKSTART, make_config, published
from tests.support.versions import make_version, serving, source

SIZE = (2, 1 << 20)  # tensors, bytes of each
SLOW = 200_000  # bytes a second: a pull that takes as long as a test needs


class Pulling:
    """A rollout role whose node is offered versions; what it says is kept."""

    def __init__(
        self, tmp_path: Path, store: Store, server: WeightServer, shares: str, **node: float
    ) -> None:
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.store, self.server = store, server
        model_dir, address = QUICKSTART / "model", "tcp://127.0.0.1:1"
        options = RolloutOptions("a", 4, model_dir, address, shares=shares)
        config = make_config(tmp_path, node=node)
        self.rollout = RolloutAgent(options, config, self.said.put_nowait, store, server)

    def offer(self, file: VersionFile, holder: WeightServer) -> None:
        self.rollout.handle(published(file, (source(holder, "a", file.policy_version),)))

    async def ready(self) -> WeightsReady:
        said = await self.said.get()
        assert isinstance(said, WeightsReady), said
        return said

    def files(self) -> set[str]:
        """Digests of the versions that are here, with ".part" behind those that are not whole."""
        names = [p.name for p in self.store.control.iterdir() if ".bin" in p.name]
        return {name.replace(".bin", "") for name in names}

    async def until_files(self, *wanted: str) -> None:
        await until(lambda: self.files() == set(wanted))


@contextlib.asynccontextmanager
async def pulling(tmp_path: Path, shares: str = "", **settings: float) -> AsyncIterator[Pulling]:
    """`settings` of the section `node`."""
    store, server = Store(str(tmp_path).encode()), WeightServer()
    store.open()
    await server.start("127.0.0.1")
    node = Pulling(tmp_path, store, server, shares, **settings)
    running = asyncio.create_task(node.rollout.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield node
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()
        store.close()


def test_pulls_that_are_overtaken_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the last of them nothing either, when its successor is what the node serves already."""
    monkeypatch.setattr(weights, "DELTA_WAIT_S", 0.0)
    files = {v: make_version(tmp_path / f"v{v}.bin", v, *SIZE) for v in range(1, 6)}

    async def scenario() -> None:
        async with (
            serving(*files.values(), max_bytes_per_s=SLOW) as slow,
            serving(files[4]) as good,
            pulling(tmp_path) as node,
        ):
            for version in range(1, 4):
                node.offer(files[version], slow)
                await node.until_files(f"{files[version].digest}.part")
            node.offer(files[4], good)
            ready = await node.ready()
            assert (ready.policy_version, ready.num_bytes) == (4, files[4].num_bytes)
            await node.until_files(files[4].digest)
            node.offer(files[5], slow)
            await node.until_files(files[4].digest, f"{files[5].digest}.part")
            await until(lambda: node.rollout.pulls is not None)
            progress = node.rollout.pulls
            assert progress is not None
            assert (progress.policy_version, progress.total_bytes) == (5, files[5].num_bytes)
            node.offer(files[4], good)
            assert await node.ready() == WeightsReady(4, files[4].digest)
            await node.until_files(files[4].digest)
            assert node.rollout.pulls is None

    asyncio.run(scenario())


def test_a_node_serves_the_version_that_it_holds_until_it_holds_the_next(tmp_path: Path):
    one, two = (make_version(tmp_path / f"v{v}.bin", v, *SIZE) for v in (1, 2))

    async def scenario() -> None:
        async with serving(one, two) as good, pulling(tmp_path) as node:
            for file in (one, two):
                node.offer(file, good)
                await node.ready()
                async with pulling(tmp_path / "other") as other:
                    other.offer(file, node.server)
                    assert (await other.ready()).num_bytes == file.num_bytes
            await node.until_files(two.digest)  # the first one is given back

    (tmp_path / "other").mkdir()
    asyncio.run(scenario())


def test_equal_weights_are_loaded_under_their_new_number_and_not_pulled(tmp_path: Path):
    one = make_version(tmp_path / "v1.bin", 1, *SIZE)
    again = VersionFile(2, one.digest, one.num_bytes, one.path, one.manifest_path)

    async def scenario() -> None:
        async with serving(one, again) as good, pulling(tmp_path) as node:
            node.offer(one, good)
            assert (await node.ready()).num_bytes == one.num_bytes
            node.offer(again, good)
            ready = await node.ready()
            assert (ready.policy_version, ready.num_bytes) == (2, 0)
            await node.until_files(one.digest)

    asyncio.run(scenario())


def test_no_start_is_begun_once_the_devices_are_to_be_given_back(tmp_path: Path):
    async def scenario() -> None:
        async with pulling(tmp_path, shares="t") as node:
            for _ in range(5):  # it waits for its devices
                await asyncio.sleep(0)
            node.rollout.handle(SetDevices("rollout", 0, True))
            node.rollout.handle(SetDevices("rollout", 1, False))
            released = await node.said.get()
            assert isinstance(released, DevicesReleased)
            assert (released.number, released.num_bytes, node.rollout.device) == (1, 0, "")

    asyncio.run(scenario())
