"""A node that uses differences: of real versions, from real sockets, with real files. `got`
compares what comes of it byte by byte, and so proves what either engine would load."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightrl.messages.weights import PublishWeights, WeightsFailed
from lightrl.rollout import weights
from lightrl.weights.delta.encoding import ZSTD
from lightrl.weights.delta.file import DeltaManifest
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.layout import BUCKET_BYTES, num_buckets
from lightrl.weights.version.manifest import VersionFile
from tests.rollout.test_weights import Node, begun, node, until
from tests.support.changing import (
    LARGER,
    delta_of,
    link_of,
    manifest_of,
    with_deltas,
    write_changed,
)
from tests.support.daemons import published
from tests.support.delta_files import pack
from tests.support.tiers import e2e
from tests.support.versions import serving, source

PULLED = "pulled whole, not by deltas: "
REST_PULLED = "what deltas cannot make of it is pulled: "


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[VersionFile]:
    folder = tmp_path_factory.mktemp("versions")
    return [write_changed(folder / f"{i}.bin", i) for i in range(4)]


@pytest.fixture(scope="module")
def deltas(versions, tmp_path_factory) -> list[VersionFile]:
    """deltas[i] leads from versions[i] to the next one."""
    folder = tmp_path_factory.mktemp("deltas")
    return [delta_of(versions[i], versions[i + 1], folder / f"{i}.bin") for i in range(3)]


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> list[VersionFile]:
    folder = tmp_path_factory.mktemp("larger")
    return [write_changed(folder / f"{i}.bin", i, shapes=LARGER) for i in range(3)]


@contextlib.asynccontextmanager
async def trainer_of(
    target: VersionFile, *things: VersionFile, **settings: float
) -> AsyncIterator[WeightServer]:
    """It serves all of this for tickets of the target."""
    version = target.policy_version
    async with serving(*(replace(t, policy_version=version) for t in things), **settings) as one:
        one.serve(target)
        yield one


def offer_to(
    one: Node, target: VersionFile, *holders: WeightServer, deltas: tuple[VersionFile, ...] = ()
) -> PublishWeights:
    sources = tuple(
        source(h, one.name, target.policy_version, name=f"holder-{i}")
        for i, h in enumerate(holders)
    )
    offer = with_deltas(published(target, sources), *deltas)
    one.weights.offer(offer)
    return offer


async def begin(one: Node, target: VersionFile, holder: WeightServer) -> None:
    """It pulls the version, and has received something."""
    offer_to(one, target, holder)
    await until(lambda: begun(one))


async def hold(one: Node, version: VersionFile) -> None:
    """It has this version, pulled whole."""
    async with serving(version) as server:
        one.offer(version, server)
        await one.got(version)


def test_a_chain_of_three_is_pulled_instead_of_a_version(tmp_path, versions, deltas, caplog):
    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            trainer_of(versions[3], *deltas) as trainer,
        ):
            await hold(a, versions[0])
            offer_to(a, versions[3], trainer, deltas=tuple(deltas))
            fetched = await a.got(versions[3])
            assert fetched.delta_bytes == fetched.stats.num_bytes
            assert fetched.delta_bytes == sum(d.num_bytes for d in deltas)
            assert fetched.delta_bytes < versions[3].num_bytes / 5

    asyncio.run(scenario())
    assert not caplog.messages


@pytest.mark.e2e
def test_of_a_chain_only_what_leads_from_the_newest_version_here_is_pulled(
    tmp_path, versions, deltas
):
    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            trainer_of(versions[3], *deltas) as trainer,
        ):
            await hold(a, versions[2])
            offer_to(a, versions[3], trainer, deltas=tuple(deltas))
            assert (await a.got(versions[3])).delta_bytes == deltas[2].num_bytes

    asyncio.run(scenario())


@pytest.mark.parametrize("held", [0, *e2e([None])])
def test_without_the_base_the_version_is_pulled(tmp_path, versions, deltas, held, caplog):
    async def scenario() -> None:
        async with node("a", tmp_path) as a, trainer_of(versions[2], deltas[1]) as trainer:
            if held is not None:
                await hold(a, versions[held])
            offer_to(a, versions[2], trainer, deltas=(deltas[1],))
            fetched = await a.got(versions[2])
            assert (fetched.delta_bytes, fetched.stats.num_bytes) == (0, versions[2].num_bytes)

    asyncio.run(scenario())
    assert not caplog.messages


def forged(kind: str, versions, deltas, folder: Path) -> VersionFile:
    """It says that it leads from version 0 to version 1."""
    size = versions[1].num_bytes
    honest = manifest_of(deltas[0])
    match kind:
        case "of another base":  # as it says itself
            return deltas[1]
        case "made with another base":
            parts = [b"" for _ in range(num_buckets(size))]
        case "no delta":
            parts = [b"\x07" * 100 for _ in range(num_buckets(size))]
        case "bomb":  # says that it becomes 2^60 bytes
            frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little")
            parts = [bytes([ZSTD]) + frame + bytes(20) for _ in range(num_buckets(size))]
        case "of a larger version":
            size *= 2
            parts = [b"" for _ in range(num_buckets(size))]
        case _:
            raise AssertionError(kind)
    manifest = DeltaManifest(honest.base, honest.target, size, tuple(map(len, parts)))
    return pack(folder / "forged.bin", 1, manifest, parts)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *e2e([("of another base", "is followed by one from")]),
        ("made with another base", "patched: digest differs"),
        *e2e(
            [
                ("no delta", "a delta of unknown kind 7"),
                ("bomb", "a delta whose compressed part is not one of 8388608 bytes"),
                ("of a larger version", "a delta of versions of"),
            ]
        ),
    ],
)
def test_a_delta_that_is_none_costs_a_line_and_the_version_is_pulled(
    tmp_path, versions, deltas, caplog, kind, reason
):
    false = forged(kind, versions, deltas, tmp_path)

    async def scenario() -> None:
        async with node("a", tmp_path) as a, trainer_of(versions[1], false) as trainer:
            await hold(a, versions[0])
            link = replace(link_of(false), base=versions[0].digest, target=versions[1].digest)
            offer = published(versions[1], (source(trainer, "a", 1),))
            a.weights.offer(replace(offer, deltas=(link,)))
            fetched = await a.got(versions[1])
            assert fetched.stats.num_bytes - fetched.delta_bytes == versions[1].num_bytes
            assert a.said.empty()

    asyncio.run(scenario())
    [line] = caplog.messages
    assert line.startswith(("version 1: " + PULLED, "version 1: " + REST_PULLED))
    assert reason in line


def test_who_sends_a_damaged_delta_is_named(tmp_path, versions, deltas, caplog):
    data = bytearray(Path(deltas[0].path).read_bytes())
    data[len(data) // 2] ^= 1
    damaged = replace(deltas[0], path=str(tmp_path / "damaged.bin"))
    Path(damaged.path).write_bytes(data)

    async def scenario() -> None:
        async with node("a", tmp_path) as a, trainer_of(versions[1], damaged) as trainer:
            await hold(a, versions[0])
            offer_to(a, versions[1], trainer, deltas=(deltas[0],))
            fetched = await a.got(versions[1])
            assert fetched.stats.num_bytes - fetched.delta_bytes == versions[1].num_bytes
            bad = await a.said.get()
            assert isinstance(bad, WeightsFailed)
            assert (bad.policy_version, bad.source) == (1, "holder-0")

    asyncio.run(scenario())
    [line] = caplog.messages
    assert PULLED in line
    assert "no source serves it" in line


def test_a_delta_that_nobody_has_is_not_waited_for(tmp_path, versions, deltas, monkeypatch, caplog):
    monkeypatch.setattr("lightrl.rollout.weights.DELTA_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with node("a", tmp_path) as a, trainer_of(versions[1]) as trainer:
            await hold(a, versions[0])
            offer_to(a, versions[1], trainer, deltas=(deltas[0],))
            assert (await a.got(versions[1])).stats.num_bytes == versions[1].num_bytes

    asyncio.run(scenario())
    [line] = caplog.messages
    assert PULLED in line
    assert "nothing arrived for 0.5 s" in line


BUCKETS_A_S = 4 * BUCKET_BYTES


def test_a_pull_starts_again_with_deltas_that_are_offered_early_and_keeps_what_it_has(
    tmp_path, larger
):
    base, target = larger[:2]
    delta = delta_of(base, target, tmp_path / "delta.bin")

    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            trainer_of(target, max_bytes_per_s=BUCKET_BYTES) as slow,
            trainer_of(target, delta) as quick,
        ):
            await hold(a, base)
            await begin(a, target, slow)
            offer_to(a, target, slow, quick, deltas=(delta,))
            fetched = await a.got(target)
            assert fetched.stats.num_bytes == fetched.delta_bytes == delta.num_bytes

    asyncio.run(scenario())


def test_a_pull_that_takes_longer_than_a_step_is_finished_for_the_deltas_from_it(tmp_path, larger):
    older, newer = larger[:2]
    delta = delta_of(older, newer, tmp_path / "delta.bin")

    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            trainer_of(older, max_bytes_per_s=BUCKETS_A_S) as slow,
            trainer_of(newer, delta) as trainer,
        ):
            await begin(a, older, slow)
            offer_to(a, newer, trainer)
            await asyncio.sleep(0)
            assert a.weights.progress is not None
            offer_to(a, newer, trainer, deltas=(delta,))
            assert (await a.got(older)).stats.num_bytes == older.num_bytes
            assert (await a.got(newer)).stats.num_bytes == delta.num_bytes

    asyncio.run(scenario())


def test_a_pull_without_deltas_to_the_newer_version_is_cancelled(tmp_path, larger, monkeypatch):
    monkeypatch.setattr(weights, "DELTA_WAIT_S", 0.1)

    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            trainer_of(larger[0], max_bytes_per_s=BUCKET_BYTES // 8) as slow,
            trainer_of(larger[1]) as trainer,
        ):
            await begin(a, larger[0], slow)
            offer_to(a, larger[1], trainer)
            assert (await a.got(larger[1])).stats.num_bytes == larger[1].num_bytes

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_pull_is_finished_without_deltas_that_have_half_of_its_rest(tmp_path, larger):
    base, target = larger[:2]
    delta = delta_of(base, target, tmp_path / "delta.bin")

    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            trainer_of(target, delta, max_bytes_per_s=BUCKETS_A_S) as trainer,
        ):
            await hold(a, base)
            await begin(a, target, trainer)
            large = replace(link_of(delta), num_bytes=target.num_bytes // 2)
            offer = published(target, (source(trainer, "a", 1),))
            a.weights.offer(replace(offer, deltas=(large,)))
            assert (await a.got(target)).delta_bytes == 0

    asyncio.run(scenario())


def test_peers_get_the_version_and_its_delta_from_a_node_that_was_patched(
    tmp_path, versions, deltas
):

    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            node("b", tmp_path / "b") as b,  # another machine
            node("c", tmp_path / "c") as c,
        ):
            await hold(a, versions[0])
            await hold(b, versions[0])
            async with trainer_of(versions[1], deltas[0]) as trainer:
                offer_to(a, versions[1], trainer, deltas=(deltas[0],))
                await a.got(versions[1])
            offer_to(b, versions[1], a.server, deltas=(deltas[0],))
            fetched = await b.got(versions[1])
            assert fetched.stats.num_bytes == fetched.delta_bytes == deltas[0].num_bytes
            offer_to(c, versions[1], b.server)
            assert (await c.got(versions[1])).stats.num_bytes == versions[1].num_bytes

    asyncio.run(scenario())


@pytest.mark.e2e
def test_deltas_of_earlier_versions_are_served_for_tickets_of_the_newest(
    tmp_path, versions, deltas
):
    async def scenario() -> None:
        async with node("a", tmp_path) as a, node("b", tmp_path / "b") as b:
            await hold(a, versions[0])
            await hold(b, versions[0])
            for i in range(2):
                async with trainer_of(versions[i + 1], deltas[i]) as trainer:
                    offer_to(a, versions[i + 1], trainer, deltas=(deltas[i],))
                    await a.got(versions[i + 1])
            offer_to(b, versions[2], a.server, deltas=tuple(deltas[:2]))
            assert (await b.got(versions[2])).delta_bytes == sum(d.num_bytes for d in deltas[:2])

    asyncio.run(scenario())


@pytest.mark.e2e
def test_what_is_patched_is_served_meanwhile(tmp_path, larger):
    """A peer without the base gets the version from one that is still at it."""
    base, target = larger[:2]
    delta = delta_of(base, target, tmp_path / "delta.bin")

    async def scenario() -> None:
        async with (
            node("a", tmp_path) as a,
            node("b", tmp_path / "b") as b,
            trainer_of(target, delta) as trainer,
        ):
            await hold(a, base)
            offer_to(b, target, a.server)
            offer_to(a, target, trainer, deltas=(delta,))
            fetched = await b.got(target)
            assert fetched.stats.num_bytes == target.num_bytes

    asyncio.run(scenario())


@pytest.mark.e2e
def test_few_deltas_are_kept(tmp_path, versions, deltas, monkeypatch):
    monkeypatch.setattr("lightrl.rollout.deltas.MAX_CHAIN", 1)

    async def scenario() -> None:
        async with node("a", tmp_path) as a:
            await hold(a, versions[0])
            for i in range(2):
                async with trainer_of(versions[i + 1], deltas[i]) as trainer:
                    offer_to(a, versions[i + 1], trainer, deltas=(deltas[i],))
                    await a.got(versions[i + 1])
            await until(lambda: not list(a.folder.glob(f"{deltas[0].digest}*")))
            assert list(a.folder.glob(f"{deltas[1].digest}.bin"))

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_version_that_is_offered_again_while_it_is_loaded_is_loaded_once(
    tmp_path, versions, deltas
):
    async def scenario() -> None:
        async with node("a", tmp_path) as a, trainer_of(versions[1], deltas[0]) as trainer:
            await hold(a, versions[0])
            offer_to(a, versions[1], trainer)
            await a.got(versions[1])
            offer_to(a, versions[1], trainer, deltas=(deltas[0],))  # it was found meanwhile
            await until(lambda: not a.weights._is_offered.is_set())
            assert not a.weights.is_next.is_set()
            a.weights.loaded()  # it could not be: offered once more, it is
            offer_to(a, versions[1], trainer, deltas=(deltas[0],))
            await a.got(versions[1])

    asyncio.run(scenario())


def test_a_delta_that_is_offered_before_the_pull_has_begun_is_used(tmp_path, versions, deltas):
    async def scenario() -> None:
        async with node("a", tmp_path) as a, trainer_of(versions[1], deltas[0]) as trainer:
            await hold(a, versions[0])
            offer_to(a, versions[1], trainer)
            await asyncio.sleep(0)  # it looks whether the version is on this machine
            await asyncio.sleep(0)
            offer_to(a, versions[1], trainer, deltas=(deltas[0],))
            assert (await a.got(versions[1])).stats.num_bytes == deltas[0].num_bytes

    asyncio.run(scenario())
