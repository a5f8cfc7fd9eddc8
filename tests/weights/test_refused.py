"""What a puller does not believe: offers, addresses and manifests that cannot be."""

import asyncio
import os
from dataclasses import replace

import pytest

from lightrl.errors import WeightsError
from lightrl.messages.weights import WeightsSource
from lightrl.weights.machine.local import partial_path
from lightrl.weights.pull.connection import parse_address
from lightrl.weights.pull.transfer import Pull
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import decode, digest_version, encode, manifest_path
from tests.support.relay import address_of, bound_socket
from tests.support.versions import NODE, make_version, pull, serving, source, wanted

DEADLINE_S = 60


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ((), "no node holds it"),
        ((WeightsSource("a", ("host",), "t"),), "host:port"),
        ((WeightsSource("a", (), "t"),), "no address"),
        ((WeightsSource("a", ("a:1",), ""),), "not a ticket"),
        ((WeightsSource("a", ("a:1",), "t" * 129),), "not a ticket"),
    ],
)
def test_a_senseless_pull_is_refused(tmp_path, sources, reason):
    version = make_version(tmp_path / "v1", num_buckets=1)
    with pytest.raises(WeightsError, match=reason):
        asyncio.run(pull(version, sources, tmp_path / "pulled"))
    assert not (tmp_path / "pulled.part").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_bytes": 0}, "cannot have 0 bytes"),
        ({"num_bytes": 1 << 49}, "cannot have"),
        ({"manifest_bytes": 1 << 29}, "its manifest cannot have"),
        ({"digest": "abc"}, "not a digest"),
        ({"digest": "Z" * 64}, "not a digest"),
    ],
)
def test_an_offer_that_cannot_be_is_refused(tmp_path, changes, reason):
    version = make_version(tmp_path / "v1", num_buckets=1, bucket=64)
    with pytest.raises(WeightsError, match=reason):
        Pull(replace(wanted(version), **changes), NODE, tmp_path / "pulled")


@pytest.mark.parametrize("address", ["", "host", "host:0", "*:1", "a b:1", "host:65536"])
def test_an_address_to_which_nobody_could_connect(address):
    with pytest.raises(WeightsError, match="looks like host:port"):
        parse_address(address)


LIES = {
    "a gap": lambda m: replace(m, tensors=(m.tensors[0], replace(m.tensors[1], offset=1 << 30))),
    "overlap": lambda m: replace(m, tensors=(m.tensors[0], replace(m.tensors[1], offset=0))),
    "size": lambda m: replace(m, num_bytes=m.num_bytes + 1),
    "huge": lambda m: replace(
        m, tensors=(TensorSpec("a", "uint8", (1 << 47,), 0),), num_bytes=1 << 47
    ),
    "larger than any": lambda m: replace(
        m, tensors=(TensorSpec("a", "int64", (1 << 50,), 0),), num_bytes=1 << 53
    ),
    "negative": lambda m: replace(m, tensors=(TensorSpec("a", "int64", (-1, -64), 0),)),
    "too few digests": lambda m: replace(m, digests=m.digests[:-32]),
    "half a digest": lambda m: replace(m, digests=m.digests[:-1]),
    "no digests": lambda m: replace(m, digests=b""),
    "nothing": lambda m: replace(m, tensors=(), num_bytes=0, digests=b""),
    "twice": lambda m: replace(m, tensors=(m.tensors[0], m.tensors[0])),
}


@pytest.mark.parametrize("kind", [*LIES, "garbage", "another", "short"])
def test_a_manifest_that_lies_is_refused_before_memory_is_taken(tmp_path, kind):
    """Those of LIES as a trainer that has gone bad would publish them, digest and all."""
    bad: list[tuple[str, str]] = []

    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=2)
        beside = manifest_path(tmp_path / "v1")
        encoded = beside.read_bytes()
        asked = wanted(version)
        if kind in LIES:
            encoded = encode(LIES[kind](decode(encoded, version.digest)))
            digest = digest_version(encoded)
            asked = replace(asked, digest=digest, manifest_bytes=len(encoded))
            version = replace(version, digest=digest)
        else:
            encoded = {"garbage": os.urandom, "another": encoded.swapcase, "short": bytes}[kind](
                *([len(encoded)] if kind != "another" else [])
            )
        beside.write_bytes(encoded)
        async with serving(version) as server, asyncio.timeout(DEADLINE_S):
            one = Pull(
                asked, NODE, tmp_path / "pulled",
                on_bad=lambda node, reason: bad.append((node, reason)),
            )  # fmt: skip
            one.add_sources([source(server, name="liar")])
            with pytest.raises(WeightsError, match=r"version 1: no source serves it; last .*: "):
                await one.run()

    asyncio.run(scenario())
    assert [node for node, _ in bad] == ["liar"]
    assert not partial_path(tmp_path / "pulled").exists()


def test_a_wrong_manifest_is_fetched_again_from_another_that_comes_later(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        wrong = tmp_path / "wrong.manifest"
        wrong.write_bytes(bytes(wanted(version).manifest_bytes))
        lying, told = replace(version, manifest_path=str(wrong)), asyncio.Queue[str]()
        async with serving(lying) as liar, asyncio.timeout(DEADLINE_S):
            one = Pull(
                wanted(version), NODE, tmp_path / "pulled",
                on_bad=lambda node, _: told.put_nowait(node),
            )  # fmt: skip
            with bound_socket() as closed:  # keeps the pull alive until somebody better comes
                late = source(liar, name="late", via=address_of(closed))
                one.add_sources([source(liar, name="liar"), late])
                running = asyncio.create_task(one.run())
                assert await told.get() == "liar"
                async with serving(version) as good:
                    one.add_sources([source(good)])
                    await running
        assert told.empty()
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())
