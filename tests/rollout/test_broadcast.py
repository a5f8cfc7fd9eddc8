"""A rollout node as a receiver of broadcasts: its engine, a training rank in a process of its own,
and the reports of the node."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.messages.broadcasts import BroadcastGroup, BroadcastStatus
from lightrl.messages.message import Message
from lightrl.messages.responses import Generate, ResponseRequest, Sampling, TokenChunk
from lightrl.messages.weights import WeightsFailed, WeightsReady
from lightrl.rollout.agent import RolloutAgent
from lightrl.rollout.broadcast import BroadcastMember
from lightrl.rollout.engine_spec import RolloutOptions
from lightrl.rollout.fetched import Announced
from lightrl.rollout.state import EngineState
from lightrl.system.timeouts import CHECKS
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.request import ASK_MANIFEST
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.tensors import write_tensors
from lightrl.wire import pack_i32, unpack_i32
from tests.engine.test_broadcast import Rank, rank
from tests.rollout.test_weights import node, until
from tests.support.daemons import QUICKSTART, make_config, published
from tests.support.holder import holder, of
from tests.support.tiers import e2e
from tests.support.versions import serving, source
from tests.support.warm import Origin, forking

MODEL = QUICKSTART / "model"
DEADLINE_S = 90.0
LONG = 400  # tokens
M = TypeVar("M")


@pytest.fixture(scope="module", autouse=True)
def engines(origin_of_runs: Origin | None) -> Iterator[None]:
    """They are forked where torch is there, and so are the ranks."""
    with forking(origin_of_runs):
        with rank():  # the first one takes long
            pass
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, VersionFile]:
    folder, files = tmp_path_factory.mktemp("versions"), {}
    for version in (1, 2, 3):
        torch.manual_seed(version)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
        files[version] = write_tensors(
            folder / f"v{version}.bin", version, model.named_parameters()
        )
    return files


class Member:
    """A node with an engine; what it says is kept."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        server: WeightServer,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        self.store, self.server = store, server
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        config = make_config(
            folder,
            rollout={
                "engine": "torch",
                "engine_args": {},
                "chunk_tokens": 1,
                "max_response_length": LONG,
            },
            weights={"timeout_s": timeout_s},
            node={"patience_s": patience_s},
        )
        options = RolloutOptions("a", 4, MODEL, "tcp://127.0.0.1:1")
        self.rollout = RolloutAgent(options, config, self.said.put_nowait, store, server)

    def offer(
        self, file: VersionFile, trainer: WeightServer, group: BroadcastGroup | None = None
    ) -> None:
        sources = (source(trainer, "a", file.policy_version),)
        self.rollout.handle(replace(published(file, sources), group=group))

    async def hears(self, kind: type[M]) -> M:
        """The next that it says; of tokens nothing."""
        while isinstance(said := await self.said.get(), TokenChunk):
            pass
        assert isinstance(said, kind), said
        return said

    async def serve(self, file: VersionFile, trainer: WeightServer) -> None:
        """By a pull."""
        self.offer(file, trainer)
        ready = await self.hears(WeightsReady)
        assert (ready.policy_version, ready.broadcast_s) == (file.policy_version, None)
        assert self.rollout.has_file

    @property
    def engine(self) -> int:
        assert self.rollout._engine is not None
        return self.rollout._engine.pid

    async def until_receiving(self) -> None:
        await until(lambda: self.rollout.state is EngineState.LOADING)

    def here(self) -> set[str]:
        """Digests of which something lies here."""
        return {path.name.partition(".")[0] for path in self.store.control.iterdir()}


@contextlib.asynccontextmanager
async def member(
    folder: Path, timeout_s: float = 20.0, patience_s: float = 600.0
) -> AsyncIterator[Member]:
    store, server = Store(str(folder).encode()), WeightServer()
    store.open()
    await server.start("127.0.0.1")
    one = Member(folder, store, server, timeout_s, patience_s)
    running = asyncio.create_task(one.rollout.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()
        store.close()


async def says(one: Rank) -> Any:
    return await asyncio.to_thread(one.says)


def test_a_node_gets_versions_by_broadcast_and_has_no_file_of_them(tmp_path: Path, files):
    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            assert a.rollout.num_workers == 1
            with rank() as one:
                for version in (2, 3):
                    one.send(files[version])
                    a.offer(files[version], trainer, one.group)
                    ready = await a.hears(WeightsReady)
                    assert (ready.policy_version, ready.digest) == a.rollout.serves
                    assert ready.policy_version == version
                    assert ready.broadcast_s is not None
                    assert ready.num_bytes == 0
                    assert await says(one) == "sent"
                    assert not a.rollout.has_file
                    await until(lambda: not a.here() & {f.digest for f in files.values()})
                    a.offer(files[version], trainer, one.group)  # once more: the group goes on
                    assert (await a.hears(WeightsReady)).broadcast_s == 0.0
            a.offer(files[3], trainer)  # somebody does not know
            known = await a.hears(WeightsReady)
            assert (known.policy_version, known.broadcast_s) == (3, 0.0)
            await a.serve(files[1], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_busy_engine_goes_on_under_the_new_version(tmp_path: Path, files):
    request = ResponseRequest("r", 1, 7, pack_i32([3, 4, 5]), b"", LONG)

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            with rank() as one:
                a.rollout.handle(Generate(1, Sampling(1.0), (request,)))
                chunks = [await a.said.get()]
                one.send(files[2])
                a.offer(files[2], trainer, one.group)
                tokens: list[int] = []
                while not chunks[-1].responses[0].finish_reason:
                    if isinstance(said := await a.said.get(), TokenChunk):
                        chunks.append(said)
                for chunk in chunks:
                    [item] = chunk.responses
                    assert item.offset == len(tokens)
                    tokens += unpack_i32(item.token_ids)
                assert len(tokens) == LONG
                assert {c.policy_version for c in chunks} == {1, 2}

    asyncio.run(scenario())


async def require_failed(a: Member, one: Rank, version: int) -> str:
    """The node's report that the broadcast failed; why."""
    status = await a.hears(BroadcastStatus)
    assert (status.policy_version, status.group, status.address) == (version, one.group.name, "")
    assert a.rollout.serves is None
    return status.reason


FAULTS = {"wrong": {"is_wrong": True}, "killed": {"signal": signal.SIGKILL}}
MORE = {"stopped": {"signal": signal.SIGSTOP}}


@pytest.mark.parametrize("fault", ["wrong", *e2e(["killed", "stopped"])])
def test_what_fails_is_not_served_but_pulled(tmp_path: Path, files, fault: str):
    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path, timeout_s=2.0) as a:
            await a.serve(files[1], trainer)
            with rank(timeout_s=2.0) as one:
                one.send(files[2], **(FAULTS | MORE)[fault])
                a.offer(files[2], trainer, one.group)
                reason = await require_failed(a, one, 2)
                assert ("digest differs" in reason) == (fault == "wrong")
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
@pytest.mark.parametrize("wanted", [2, 3])
def test_what_is_to_be_pulled_instead_is_dropped_without_a_report(
    tmp_path: Path, files, wanted: int
):
    """The same version or a newer one, while the rank keeps all waiting."""

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            with rank(timeout_s=60.0) as one:
                one.send(files[2], waits=True)
                a.offer(files[2], trainer, one.group)
                assert await says(one) == "waits"
                await a.until_receiving()
                await a.serve(files[wanted], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_does_not_drop_what_it_receives_is_killed(tmp_path: Path, files):
    """Not before it would have noticed it itself, however short a silence is allowed to an engine
    that works."""

    async def scenario() -> None:
        async with (
            serving(*files.values()) as trainer,
            member(tmp_path, timeout_s=2.0, patience_s=1.0) as a,
        ):
            await a.serve(files[1], trainer)
            with rank(timeout_s=60.0) as one:
                one.send(files[2], waits=True)
                a.offer(files[2], trainer, one.group)
                assert await says(one) == "waits"
                await a.until_receiving()
                os.kill(a.engine, signal.SIGSTOP)
                a.offer(files[2], trainer)
                assert "no answer for 3 s" in (await a.hears(WeightsFailed)).reason
                assert a.rollout.num_workers == 0
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_hangs_while_it_receives_is_killed(tmp_path: Path, files):
    """What was sent lies in the buffers of the line to it, so nobody else waits for it."""

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path, timeout_s=1.0) as a:
            await a.serve(files[1], trainer)
            with rank() as one:
                a.offer(files[2], trainer, one.group)
                await a.until_receiving()
                os.kill(a.engine, signal.SIGSTOP)
                assert "hangs" in (await a.hears(WeightsFailed)).reason
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


def test_an_engine_that_notices_it_in_time_is_not_killed():
    """Time is counted in looks, and the first one may come at once."""
    timeout_s = 8.0
    longest_s = BroadcastMember([].append, "h", timeout_s).patience_s
    assert longest_s * (CHECKS - 1) / CHECKS >= 1.25 * timeout_s


@pytest.mark.parametrize("state", ["receives", *e2e(["stands"])])
def test_an_engine_dies_as_a_member(tmp_path: Path, files, state: str):
    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            with rank() as one:
                one.send(files[2], waits=state == "receives")
                a.offer(files[2], trainer, one.group)
                if state == "receives":
                    assert await says(one) == "waits"
                    await a.until_receiving()
                else:
                    await a.hears(WeightsReady)
                os.kill(a.engine, signal.SIGKILL)
                assert (await a.hears(WeightsFailed)).policy_version == 2
            await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_offer_that_nobody_receives_any_more_is_answered(tmp_path: Path, files):
    """The engine dies while its node fetches the manifest; the coordinator still wants it so."""
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def no_data(request: Any, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("asked for data")

    async def scenario() -> None:
        holds = of(files[2], no_data)

        async def answer(request: Any, writer: asyncio.StreamWriter) -> None:
            if request.what == ASK_MANIFEST:
                asked.set()
                await goes_on.wait()
            await holds(request, writer)

        async with (
            serving(*files.values()) as trainer,
            holder(answer) as slow,
            member(tmp_path) as a,
        ):
            await a.serve(files[1], trainer)
            with rank() as one:
                offer = published(files[2], (source(trainer, "a", 2, via=slow),))
                a.rollout.handle(replace(offer, group=one.group))
                await asked.wait()
                os.kill(a.engine, signal.SIGKILL)
                await a.hears(WeightsFailed)
                goes_on.set()
                assert "no engine" in await require_failed(a, one, 2)
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_manifest_that_cannot_be_had_ends_the_broadcast(tmp_path: Path, files):
    manifest = Path(files[2].manifest_path).read_bytes()

    async def scenario() -> None:
        async def answer(request: Any, writer: asyncio.StreamWriter) -> None:
            raise AssertionError("asked for data")

        lying = tmp_path / "lie.manifest"
        lying.write_bytes(manifest[:-1] + bytes([manifest[-1] ^ 1]))
        async with (
            serving(*files.values()) as trainer,
            holder(of(replace(files[2], manifest_path=str(lying)), answer)) as liar,
            member(tmp_path) as a,
        ):
            await a.serve(files[1], trainer)
            with rank() as one:
                offer = published(files[2], (source(trainer, "a", 2, via=liar),))
                a.rollout.handle(replace(offer, group=one.group))
                await a.hears(WeightsFailed)
                status = await a.hears(BroadcastStatus)
                assert (status.group, "digest" in status.reason) == (one.group.name, True)
            assert a.rollout.serves == (1, files[1].digest)
            assert a.rollout.has_file
            await until(lambda: files[2].digest not in a.here())

    asyncio.run(scenario())


@pytest.mark.e2e
def test_of_a_version_that_comes_by_broadcast_only_the_manifest_is_fetched(tmp_path: Path, files):
    """From a source that listens everywhere, which is reached where the coordinator is."""
    file = files[2]

    async def scenario() -> None:
        async with serving(file) as trainer, node("a", tmp_path) as a:
            port = trainer.addresses[0].rpartition(":")[2]
            offer = published(file, (source(trainer, "a", 2, via=f"0.0.0.0:{port}"),))
            a.weights.offer(replace(offer, group=BroadcastGroup("g", "h:1", 1, 2, "gloo")))
            announced = await a.weights.next()
            assert isinstance(announced, Announced)
            assert read_manifest(announced.file) == read_manifest(file)
            assert [p for p in a.folder.iterdir() if ".bin" in p.name] == []
            a.weights.loaded()
            await until(lambda: not Path(announced.file.manifest_path).exists())

    asyncio.run(scenario())
