"""What a rollout node keeps of its pulls: the version that it serves, and what it can go on
with."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from lightrl.messages import Manifest, Message, PublishWeights, WeightsFailed, WeightsReady
from lightrl.rollout.agent import RolloutAgent
from lightrl.tickets import pull_ticket
from lightrl.weights.request import DATA, Request
from tests.support.daemons import DEADLINE_S, QUICKSTART, make_config
from tests.support.holder import holder, part
from tests.support.versions import BUCKET, SECRET, make_version, serving


class Pulling:
    """A rollout role whose node is offered versions; what it says is kept."""

    def __init__(self, tmp_path: Path) -> None:
        self.scratch = tmp_path / "scratch"
        self.scratch.mkdir()
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        config, model_dir = make_config(tmp_path), QUICKSTART / "model"
        places = (model_dir, self.scratch, None)
        self.rollout = RolloutAgent(
            "a", config, 4, *places, "tcp://127.0.0.1:1", self.said.put_nowait
        )

    def offer(self, manifest: Manifest, holder: str) -> None:
        ticket = pull_ticket(SECRET, "a", manifest.policy_version)
        self.rollout.handle(PublishWeights(manifest, (holder,), ticket))

    def files(self) -> list[str]:
        return sorted(file.name for file in self.scratch.iterdir())


@contextlib.asynccontextmanager
async def pulling(tmp_path: Path) -> AsyncIterator[Pulling]:
    node = Pulling(tmp_path)
    running = asyncio.create_task(node.rollout.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield node
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_pulls_that_are_overtaken_leave_nothing(tmp_path: Path):
    """Of the last of them nothing either, when its successor is what the node serves already."""
    manifests = {v: make_version(tmp_path / f"v{v}", v) for v in range(1, 8)}
    stalled: asyncio.Queue[int] = asyncio.Queue()

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        """Half a bucket, no more."""
        data = part((tmp_path / f"v{request.policy_version}").read_bytes(), request)
        writer.write(DATA + data[: BUCKET // 2])
        await writer.drain()
        stalled.put_nowait(request.policy_version)
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with (
            holder(answer) as slow,
            serving(manifests[6], tmp_path / "v6") as good,
            pulling(tmp_path) as node,
        ):
            for version in range(1, 6):
                node.offer(manifests[version], slow)
                while await stalled.get() != version:
                    pass
                assert node.files() == [f"version_{version}.bin.part"]
            node.offer(manifests[6], good)
            ready = await node.said.get()
            assert isinstance(ready, WeightsReady)
            assert ready.policy_version == 6
            assert node.files() == ["version_6.bin"]
            node.offer(manifests[7], slow)
            while await stalled.get() != 7:
                pass
            node.offer(manifests[6], good)
            assert await node.said.get() == WeightsReady(6, manifests[6].digest)
            assert node.files() == ["version_6.bin"]

    asyncio.run(scenario())


def test_a_pull_that_failed_goes_on_where_it_was_when_its_version_is_offered_again(tmp_path: Path):
    manifest = make_version(tmp_path / "v1")
    data = (tmp_path / "v1").read_bytes()
    asked: list[int] = []

    async def until_the_last_bucket(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.offset == 3 * BUCKET:
            writer.close()
        else:
            writer.write(DATA + part(data, request))

    async def all_of_it(request: Request, writer: asyncio.StreamWriter) -> None:
        asked.append(request.offset)
        writer.write(DATA + part(data, request))

    async def scenario() -> None:
        async with (
            holder(until_the_last_bucket) as bad,
            holder(all_of_it) as good,
            pulling(tmp_path) as node,
        ):
            node.offer(manifest, bad)
            assert isinstance(await node.said.get(), WeightsFailed)
            assert node.files() == ["version_1.bin.part"]
            node.offer(manifest, good)
            assert isinstance(await node.said.get(), WeightsReady)
            assert node.files() == ["version_1.bin"]
        assert set(asked) == {3 * BUCKET}

    asyncio.run(scenario())
