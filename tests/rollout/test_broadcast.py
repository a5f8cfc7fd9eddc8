"""A rollout node as a member of a broadcast group: its engine, a training rank in a process of its
own, and what the coordinator is told."""

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

from lightrl.messages.broadcasts import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastSums,
    JoinBroadcast,
)
from lightrl.messages.message import Message
from lightrl.messages.responses import Generate, ResponseRequest, Sampling, TokenChunk
from lightrl.messages.weights import BadSource, WeightsFailed, WeightsReady
from lightrl.rollout.agent import RolloutAgent
from lightrl.rollout.broadcast import BroadcastMember
from lightrl.rollout.fetched import Announced
from lightrl.rollout.state import EngineState
from lightrl.system.timeouts import CHECKS
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.request import ASK_MANIFEST
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.tensors import write_tensors
from lightrl.wire import pack_i32, unpack_i32
from tests.engine.test_broadcast import Rank, rank, unanswered
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
        with sender():  # the first one takes long
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
        self.rollout = RolloutAgent(
            "a", config, 4, MODEL, None, "tcp://127.0.0.1:1", self.said.put_nowait, store, server
        )

    def offer(self, file: VersionFile, trainer: WeightServer, group: str = "") -> None:
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

    def order_to_join(self, one: Rank) -> None:
        place = one.place
        self.rollout.handle(
            JoinBroadcast(place.name, one.address, place.rank, place.num_ranks, place.world, "gloo")
        )

    async def join(self, one: Rank) -> str:
        self.order_to_join(one)
        assert (await self.hears(BroadcastJoined)).group == one.place.name
        return one.place.name

    def prove(self, group: str, file: VersionFile, sums: tuple[int, ...]) -> None:
        self.rollout.handle(BroadcastSums(group, file.policy_version, sums))

    @property
    def engine(self) -> int:
        assert self.rollout._engine is not None
        return self.rollout._engine.pid

    async def until_receiving(self) -> None:
        await until(lambda: self.rollout.state in {EngineState.LOADING, EngineState.RELOADING})

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


def sender(timeout_s: float = 20.0) -> Any:
    return rank(timeout_s, piece_bytes=BUCKET_BYTES)


async def send(one: Rank, file: VersionFile, at: int | None = None, number: int = 0) -> Any:
    return await asyncio.to_thread(one.send, file, at, number)


async def says(one: Rank) -> Any:
    return await asyncio.to_thread(one.says)


def test_a_node_gets_versions_by_broadcast_and_has_no_file_of_them(tmp_path: Path, files):
    """The sums come when the engine has received, or before it is told to receive."""

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            assert a.rollout.num_workers == 1
            with sender() as one:
                group = await a.join(one)
                for version in (2, 3):
                    sums = await send(one, files[version])
                    if version == 2:
                        a.offer(files[version], trainer, group)
                        assert await says(one) == "sent"
                        assert a.rollout.serves is None
                    a.prove(group, files[version], sums)
                    if version == 3:
                        a.offer(files[version], trainer, group)
                    ready = await a.hears(WeightsReady)
                    assert (ready.policy_version, ready.digest) == a.rollout.serves
                    assert ready.policy_version == version
                    assert ready.broadcast_s is not None
                    assert ready.num_bytes == 0
                    assert not a.rollout.has_file
                    await until(lambda: not a.here() & {f.digest for f in files.values()})
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
            with sender() as one:
                group = await a.join(one)
                a.rollout.handle(Generate(1, Sampling(1.0), (request,)))
                chunks = [await a.said.get()]
                a.offer(files[2], trainer, group)
                a.prove(group, files[2], await send(one, files[2]))
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


@pytest.mark.e2e
def test_what_is_not_what_was_sent_is_not_served_but_pulled(tmp_path: Path, files):
    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            with sender() as one:
                await a.serve(files[1], trainer)
                group = await a.join(one)
                a.offer(files[2], trainer, group)
                sums = await send(one, files[2])
                a.prove(group, files[2], (sums[0] ^ 1, *sums[1:]))
                failed = await a.hears(BroadcastFailed)
                assert failed.group == group
                assert "not what the ranks sent" in failed.reason
                assert a.rollout.serves is None
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_what_is_to_be_pulled_instead_is_dropped_without_a_word(tmp_path: Path, files):
    """In the middle, by an offer of the same version, while a rank keeps all waiting; and by a
    newer one while the sums are missing."""

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            for comes, wanted in ((2, 2), (1, 3)):
                with sender() as one:
                    group = await a.join(one)
                    a.offer(files[comes], trainer, group)
                    await send(one, files[comes], at=3)
                    assert await says(one) == "waits"
                    await a.until_receiving()
                    if comes != wanted:
                        one.pipe.send("go on")
                        assert await says(one) == "sent"
                    await a.serve(files[wanted], trainer)
                    if comes != wanted:
                        await send(one, files[1])
                    else:
                        one.pipe.send("go on")
                    assert "not wanted" in await says(one)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_version_that_comes_by_broadcast_after_all_is_pulled_no_further(tmp_path: Path, files):
    """It was given up when the engine had been told already what was sent: what is there of the
    file goes."""
    asked = asyncio.Event()

    async def scenario() -> None:
        async def answer(request: Any, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await asyncio.Event().wait()

        async with (
            serving(*files.values()) as trainer,
            holder(of(files[2], answer)) as slow,
            member(tmp_path) as a,
        ):
            await a.serve(files[1], trainer)
            with sender() as one:
                group = await a.join(one)
                a.offer(files[2], trainer, group)
                sums = await send(one, files[2], at=3)
                assert await says(one) == "waits"
                await a.until_receiving()
                a.prove(group, files[2], sums)
                a.rollout.handle(published(files[2], (source(trainer, "a", 2, via=slow),)))
                await asked.wait()
                one.pipe.send("go on")
                assert await says(one) == "sent"
                ready = await a.hears(WeightsReady)
                assert ready.policy_version == 2
                assert ready.broadcast_s is not None
                await until(lambda: a.rollout.pulls is None)
                await until(lambda: files[2].digest not in a.here())
                assert not a.rollout.has_file
                assert a.said.empty()
                # and the group goes on
                a.offer(files[3], trainer, group)
                a.prove(group, files[3], await send(one, files[3]))
                assert (await a.hears(WeightsReady)).policy_version == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("how", [signal.SIGKILL, *e2e([signal.SIGSTOP])], ids=["killed", "stopped"])
def test_a_rank_dies_or_hangs_in_the_middle(tmp_path: Path, files, how: signal.Signals):
    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path, timeout_s=2.0) as a:
            await a.serve(files[1], trainer)
            with sender(timeout_s=2.0) as one:
                group = await a.join(one)
                a.offer(files[2], trainer, group)
                await send(one, files[2], at=3, number=how)
                assert (await a.hears(BroadcastFailed)).group == group
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_does_not_drop_what_it_receives_is_killed(tmp_path: Path, files):
    """Which frees the others of its group; not before it would have noticed it itself, however
    short a silence is allowed to an engine that works."""

    async def scenario() -> None:
        async with (
            serving(*files.values()) as trainer,
            member(tmp_path, timeout_s=2.0, patience_s=1.0) as a,
        ):
            await a.serve(files[1], trainer)
            with sender(timeout_s=60.0) as one:
                group = await a.join(one)
                a.offer(files[2], trainer, group)
                await send(one, files[2], at=3)
                assert await says(one) == "waits"
                await a.until_receiving()
                os.kill(a.engine, signal.SIGSTOP)
                a.offer(files[2], trainer)
                assert "no answer for 3 s" in (await a.hears(WeightsFailed)).reason
                assert (await a.hears(BroadcastFailed)).group == group
                assert a.rollout.num_workers == 0
                await a.serve(files[2], trainer)
                one.pipe.send("go on")
                assert "member 1 is gone" in await says(one)

    asyncio.run(scenario())


def test_an_engine_that_notices_it_in_time_is_not_killed():
    """Time is counted in looks, and the first one may come at once."""
    timeout_s = 8.0
    longest_s = BroadcastMember([].append, "h", timeout_s).patience_s
    assert longest_s * (CHECKS - 1) / CHECKS >= 1.25 * timeout_s


@pytest.mark.e2e
def test_a_version_that_it_has_and_is_told_of_once_more_does_not_end_the_group(tmp_path, files):
    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            with sender() as one:
                group = await a.join(one)
                for version in (2, 3):
                    a.offer(files[version], trainer, group)
                    a.prove(group, files[version], await send(one, files[version]))
                    assert await says(one) == "sent"
                    assert (await a.hears(WeightsReady)).policy_version == version
                    a.offer(files[version], trainer, group)
                    assert (await a.hears(WeightsReady)).broadcast_s == 0.0

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
            with sender() as one:
                group = await a.join(one)
                offer = published(files[2], (source(trainer, "a", 2, via=slow),))
                a.rollout.handle(replace(offer, group=group))
                await asked.wait()
                os.kill(a.engine, signal.SIGKILL)
                await a.hears(WeightsFailed)
                assert (await a.hears(BroadcastFailed)).group == group
                goes_on.set()
                assert "no engine" in (await a.hears(BroadcastFailed)).reason
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_does_not_prove_what_was_sent_is_killed(tmp_path: Path, files):
    """What was sent lies in the buffers of the line to an engine that is stopped, so nobody else
    waits for it."""

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path, timeout_s=2.0) as a:
            await a.serve(files[1], trainer)
            with sender() as one:
                group = await a.join(one)
                a.offer(files[2], trainer, group)
                await a.until_receiving()
                os.kill(a.engine, signal.SIGSTOP)
                a.prove(group, files[2], (1, 2, 3, 4))
                assert "hangs" in (await a.hears(WeightsFailed)).reason
                assert (await a.hears(BroadcastFailed)).group == group
                await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_an_engine_that_does_not_join_is_killed_also_when_a_version_was_pulled(
    tmp_path: Path, files
):
    """The group is over for the others before that."""

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path, timeout_s=2.0) as a:
            await a.serve(files[1], trainer)
            os.kill(a.engine, signal.SIGSTOP)
            a.rollout.handle(JoinBroadcast("nobody", "127.0.0.1:9", 1, 1, 2, "gloo"))
            a.offer(files[2], trainer)
            await a.until_receiving()
            assert "hangs" in (await a.hears(WeightsFailed)).reason
            assert (await a.hears(BroadcastFailed)).group == "nobody"
            await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.parametrize("state", ["receives", *e2e(["joined"])])
def test_an_engine_dies_as_a_member(tmp_path: Path, files, state: str):
    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path) as a:
            await a.serve(files[1], trainer)
            with sender() as one:
                group = await a.join(one)
                if state == "receives":
                    a.offer(files[2], trainer, group)
                    await send(one, files[2], at=3)
                    await a.until_receiving()
                os.kill(a.engine, signal.SIGKILL)
                await a.hears(WeightsFailed)
                assert (await a.hears(BroadcastFailed)).group == group
                a.order_to_join(one)
                assert "no engine" in (await a.hears(BroadcastFailed)).reason
            await a.serve(files[2], trainer)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_manifest_that_cannot_be_had_ends_the_group_at_once(tmp_path: Path, files):
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
            with sender() as one:
                group = await a.join(one)
                offer = published(files[2], (source(trainer, "a", 2, via=liar),))
                a.rollout.handle(replace(offer, group=group))
                await a.hears(BadSource)
                failed = await a.hears(BroadcastFailed)
                assert failed.group == group
                assert "digest" in failed.reason
                await send(one, files[2])
                assert "not wanted" in await says(one)
            assert a.rollout.serves == (1, files[1].digest)
            assert a.rollout.has_file
            await until(lambda: files[2].digest not in a.here())

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_rank_that_cannot_be_reached_is_said_to_be_so(tmp_path: Path, files):
    """One that does not listen any more can be reached."""

    async def scenario() -> None:
        async with serving(*files.values()) as trainer, member(tmp_path, timeout_s=1.0) as a:
            await a.serve(files[1], trainer)
            with unanswered() as silent:
                for address, is_unreachable in (("127.0.0.1:9", False), (silent, True)):
                    a.rollout.handle(JoinBroadcast("nobody", address, 1, 1, 2, "gloo"))
                    failed = await a.hears(BroadcastFailed)
                    assert (failed.group, failed.is_unreachable) == ("nobody", is_unreachable)

    asyncio.run(scenario())


@pytest.mark.e2e
def test_of_a_version_that_comes_by_broadcast_only_the_manifest_is_fetched(tmp_path: Path, files):
    """From a source that listens everywhere, which is reached where the coordinator is."""
    file = files[2]

    async def scenario() -> None:
        async with serving(file) as trainer, node("a", tmp_path) as a:
            port = trainer.addresses[0].rpartition(":")[2]
            offer = published(file, (source(trainer, "a", 2, via=f"0.0.0.0:{port}"),))
            a.weights.offer(replace(offer, group="g"))
            announced = await a.weights.next()
            assert isinstance(announced, Announced)
            assert read_manifest(announced.file) == read_manifest(file)
            assert [p for p in a.folder.iterdir() if ".bin" in p.name] == []
            a.weights.loaded()
            await until(lambda: not Path(announced.file.manifest_path).exists())

    asyncio.run(scenario())
