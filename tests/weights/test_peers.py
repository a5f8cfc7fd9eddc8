"""Nodes that pull the same version from each other: what the trainer sends, who lies, who dies."""

import asyncio
import contextlib
import fcntl
import filecmp
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightrl.messages.weights import WeightsSource
from lightrl.weights.pull.transfer import Pull, PullStats
from lightrl.weights.serve.request import ASK_DATA, ASK_SHARED, DATA, MISSING, QUEUED, Request
from lightrl.weights.serve.send import SHARED_TURNS
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import VersionFile
from tests.support.holder import Answer, holder, of, part
from tests.support.relay import Relay
from tests.support.tiers import e2e
from tests.support.versions import NODE, make_version, pull, serving, source, wanted

DEADLINE_S = 60


class Joiners:
    """Nodes with a server each, which know each other and the trainer."""

    def __init__(self, folder: Path, version: VersionFile, trainer: WeightServer) -> None:
        self.folder, self.version, self.trainer = folder, version, trainer
        self.servers: dict[str, WeightServer] = {}

    async def add(self, *nodes: str, **settings: float) -> None:
        for node in nodes:
            self.servers[node] = WeightServer(**settings)  # pyright: ignore[reportArgumentType]
            await self.servers[node].start("127.0.0.1")

    def sources(self, node: str) -> list[WeightsSource]:
        peers = [source(s, node, name=n) for n, s in self.servers.items() if n != node]
        return [*peers, source(self.trainer, node)]

    async def pull(self, node: str, **options) -> PullStats:
        path = self.folder / node
        one = Pull(wanted(self.version), node, path, server=self.servers[node], **options)
        one.add_sources(self.sources(node))
        stats = await one.run()
        assert filecmp.cmp(path, self.version.path, shallow=False)
        return stats

    async def close(self) -> None:
        for server in self.servers.values():
            await server.close()


@contextlib.asynccontextmanager
async def joiners(
    tmp_path: Path, num_buckets: int, pace: float | None = None
) -> AsyncIterator[Joiners]:
    """With a trainer on a line of `pace` bytes/s."""
    version = make_version(tmp_path / "v1", num_buckets=num_buckets)
    settings = {} if pace is None else {"max_bytes_per_s": pace}
    async with serving(version, **settings) as trainer, asyncio.timeout(DEADLINE_S):
        nodes = Joiners(tmp_path, version, trainer)
        try:
            yield nodes
        finally:
            await nodes.close()


@pytest.mark.e2e
def test_eight_joiners_take_little_more_than_one_version_from_the_trainer_and_a_ninth_nothing(
    tmp_path,
):
    async def scenario() -> None:
        async with joiners(tmp_path, num_buckets=16, pace=40e6) as nodes:
            names = [f"n{k}" for k in range(8)]
            await nodes.add(*names)
            stats = await asyncio.gather(*map(nodes.pull, names))
            size = nodes.version.num_bytes
            assert all(s.num_bytes >= size for s in stats)
            assert sum(s.num_bytes - s.peer_bytes for s in stats) <= 2 * size
            assert len({n for s in stats for n in s.by_source}) > 5  # most have served
            await nodes.add("late")
            assert (await nodes.pull("late")).peer_bytes == size

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_joiner_half_way_is_served_by_those_who_are_still_at_it(tmp_path):
    async def scenario() -> None:
        async with joiners(tmp_path, num_buckets=12, pace=30e6) as nodes:
            await nodes.add("first", "second")
            half_way = asyncio.Event()
            first = asyncio.create_task(nodes.pull("first", on_progress=at(5, half_way)))
            await half_way.wait()
            second = await nodes.pull("second")
            assert (await first).num_bytes == nodes.version.num_bytes
            assert second.by_source["first"] >= 5 * BUCKET_BYTES

    asyncio.run(scenario())


def at(num_buckets: int, reached: asyncio.Event) -> Callable[..., None]:
    def note(progress) -> None:
        if progress.num_bytes >= num_buckets * BUCKET_BYTES:
            reached.set()

    return note


def test_what_a_killed_peer_owes_goes_to_others(tmp_path):
    async def scenario() -> None:
        async with joiners(tmp_path, num_buckets=16, pace=60e6) as nodes:
            names = [f"n{k}" for k in range(4)]
            await nodes.add(*names)
            half_way = asyncio.Event()
            options = {"on_progress": at(4, half_way)}
            pulls = {n: asyncio.create_task(nodes.pull(n, **options)) for n in names}
            await half_way.wait()
            pulls["n0"].cancel()
            await nodes.servers["n0"].close()
            await asyncio.gather(*(pulls[n] for n in names[1:]))

    asyncio.run(scenario())


def test_a_lying_peer_is_named_and_avoided_and_spoils_nobody_else(tmp_path):
    """It says that it has everything; what it sends is wrong."""
    bad: list[tuple[str, str]] = []

    async def scenario() -> None:
        async with joiners(tmp_path, num_buckets=8) as nodes:
            lies = tmp_path / "lies"
            lies.write_bytes(bytes(nodes.version.num_bytes))
            await nodes.add("liar", "a", "b")
            nodes.servers["liar"].serve(replace(nodes.version, path=str(lies)))
            pulls = [
                nodes.pull(n, on_bad=lambda node, why, n=n: bad.append((n, node)))
                for n in ("a", "b")
            ]
            await asyncio.gather(*pulls)

    asyncio.run(scenario())
    assert set(bad) <= {("a", "liar"), ("b", "liar")}
    assert bad


def answering(version: VersionFile, delay: Callable[[], bool]) -> Answer:
    """A holder of everything that sends a tenth of a bucket and then nothing, if it is to."""

    whole = Path(version.path).read_bytes()

    async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
        data = part(whole, request)
        if delay():
            writer.write(DATA + data[: BUCKET_BYTES // 10])
            await writer.drain()
            await asyncio.Event().wait()
        writer.write(DATA + data)

    return of(version, respond)


@pytest.mark.parametrize("num_buckets", [1, *e2e([8])])
def test_what_a_silent_peer_owes_goes_to_others_within_a_second(tmp_path, num_buckets):
    """Also at the end of a pull, when nothing else is left to do."""

    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=num_buckets)
        async with (
            holder(answering(version, lambda: True)) as silent,
            serving(version) as trainer,
            asyncio.timeout(DEADLINE_S),
        ):
            begun = time.monotonic()
            sources = [WeightsSource("silent", (silent,), "t"), source(trainer)]
            stats = await pull(version, sources, tmp_path / "pulled")
            assert time.monotonic() - begun < 5  # a busy machine; the limit for silence is 60 s
        assert stats.by_source["trainer"] == version.num_bytes
        assert 0 < stats.by_source["silent"] <= 4 * BUCKET_BYTES // 10

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_dripping_peer_does_not_hold_up_the_end(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=4)
        async with (
            serving(version, max_bytes_per_s=2e5) as slow,
            serving(version) as trainer,
            asyncio.timeout(DEADLINE_S),
        ):
            sources = [source(slow, name="slow"), source(trainer)]
            stats = await pull(version, sources, tmp_path / "pulled")
        assert stats.seconds < 15  # 160 s at its pace
        assert stats.by_source["trainer"] == version.num_bytes

    asyncio.run(scenario())


def test_a_peer_that_has_nothing_or_says_nonsense_is_passed_over(tmp_path):
    async def nonsense(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"p" + b"\xff" * 4096)

    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=4)
        async with (
            holder(nonsense) as mad,
            serving() as empty,
            serving(version) as trainer,
            asyncio.timeout(DEADLINE_S),
        ):
            sources = [
                WeightsSource("mad", (mad,), "t"),
                source(empty, name="empty"),
                source(trainer),
            ]
            stats = await pull(version, sources, tmp_path / "pulled")
        assert stats.by_source == {"trainer": version.num_bytes}

    asyncio.run(scenario())


def test_of_a_partial_holder_only_what_is_proved_can_be_had(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=4)
        async with serving() as server, asyncio.timeout(DEADLINE_S):
            partial = server.serve_partial(version)
            for bucket in (0, 2):
                partial.verified(bucket)
            progress: list[int] = []
            pulling = asyncio.create_task(
                pull(
                    version, [source(server)], tmp_path / "pulled",
                    on_progress=lambda p: progress.append(p.num_bytes // BUCKET_BYTES),
                )
            )  # fmt: skip
            while progress[-1:] != [2]:
                await asyncio.wait({pulling}, timeout=0.05)
            partial.verified(1)
            partial.verified(3)  # the rest comes while the puller waits
            partial.complete()
            assert (await pulling).num_bytes == version.num_bytes
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())


def test_a_retired_version_is_free_when_the_future_says_so(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=2)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            relay = Relay(server.addresses[0], lambda _: 100_000, asyncio.Event())
            async with relay as address:
                pulling = asyncio.create_task(
                    pull(version, [source(server, via=address)], tmp_path / "pulled")
                )
                await relay.stalled.wait()
                assert not can_be_overwritten(version)
                begun = time.monotonic()
                retired = server.retire(version.digest, grace_s=0.3)
                assert not retired.done()
                await retired
                assert 0.2 < time.monotonic() - begun < 5
                assert can_be_overwritten(version)
                pulling.cancel()
                await asyncio.gather(pulling, return_exceptions=True)
            await server.retire(version.digest)  # once more: nothing happens

    asyncio.run(scenario())


def can_be_overwritten(version: VersionFile) -> bool:
    with Path(version.path).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.mark.e2e
def test_a_source_that_joins_is_used_at_once(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=8)
        async with (
            serving(version, max_bytes_per_s=4e6) as trainer,
            serving(version) as peer,
            asyncio.timeout(DEADLINE_S),
        ):
            moving = asyncio.Event()
            one = Pull(
                wanted(version), NODE, tmp_path / "pulled", on_progress=lambda _: moving.set()
            )
            one.add_sources([source(trainer)])
            running = asyncio.create_task(one.run())
            await moving.wait()
            one.add_sources([source(peer, name="peer"), source(trainer)])
            stats = await running
        assert stats.seconds < 8  # 16 s by the trainer alone
        assert stats.by_source["peer"] >= 4 * BUCKET_BYTES

    asyncio.run(scenario())


def test_those_who_pass_on_what_they_get_are_sent_to_one_after_the_other(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            host, _, port = server.addresses[0].rpartition(":")
            asked, signs = [ASK_SHARED] * (SHARED_TURNS + 1) + [ASK_DATA], list[bytes]()
            writers = list[asyncio.StreamWriter]()
            for k, what in enumerate(asked):
                # nobody reads more than a byte: none of them is done
                reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
                ticket = source(server, f"n{k}").ticket.encode()
                digest = bytes.fromhex(version.digest)
                request = Request(what, digest, 1, 0, BUCKET_BYTES, f"n{k}".encode(), ticket)
                writer.write(request.pack())
                signs.append(await reader.read(1))
                writers.append(writer)
            assert signs == [DATA] * SHARED_TURNS + [QUEUED, DATA]
            for writer in writers:
                writer.close()

    asyncio.run(scenario())


def test_what_a_partial_holder_has_not_proved_is_not_to_be_had(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=3)
        async with serving() as server, asyncio.timeout(DEADLINE_S):
            server.serve_partial(version).verified(1)
            host, _, port = server.addresses[0].rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            ticket, digest = source(server).ticket.encode(), bytes.fromhex(version.digest)
            size = BUCKET_BYTES
            for offset, length, sign in (
                (0, 1, MISSING),
                (size - 1, 2, MISSING),
                (size, 16, DATA),
                (size, size + 1, MISSING),
                (2 * size - 16, 16, DATA),
            ):
                request = Request(ASK_DATA, digest, 1, offset, length, NODE.encode(), ticket)
                writer.write(request.pack())
                assert await reader.readexactly(1) == sign
                if sign == DATA:
                    await reader.readexactly(length)
            writer.close()

    asyncio.run(scenario())
