from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrl.errors import WeightsError
from lightrl.weights.delta.file import (
    MAX_DELTA_RATIO,
    DeltaManifest,
    PackedDelta,
    check_chain,
    element_runs,
    encode_buckets,
    header,
    may_be_small,
    open_packed,
)
from lightrl.weights.version.layout import BUCKET_BYTES, ITEMSIZES, num_bytes, plan
from lightrl.weights.version.manifest import VersionFile, read_manifest
from tests.support.changing import delta_of, write_changed
from tests.support.delta_files import offer_of, pack, patch_version, write_delta
from tests.support.tiers import e2e
from tests.support.versions import wrong_buckets


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[VersionFile]:
    folder = tmp_path_factory.mktemp("versions")
    return [write_changed(folder / f"{i}.bin", i) for i in range(3)]


def opened(delta: VersionFile) -> PackedDelta:
    return open_packed(Path(delta.path), delta.num_bytes)


def patched(base: VersionFile, chain: list[VersionFile], target: VersionFile) -> bytes:
    """What a node makes of its version and a chain of deltas."""
    deltas, manifest = [opened(d) for d in chain], read_manifest(target)
    check_chain([d.manifest for d in deltas], base.digest, target.digest, target.num_bytes)
    return patch_version(base, deltas, manifest)


def test_a_delta_leads_from_one_version_to_the_next(versions, tmp_path):
    base, target, _ = versions
    delta = delta_of(base, target, tmp_path / "delta.bin")
    assert Path(delta.path).stat().st_size == delta.num_bytes < target.num_bytes / 20
    assert patched(base, [delta], target) == Path(target.path).read_bytes()


def test_a_delta_travels_as_an_ordinary_version(versions, tmp_path):
    base, target, _ = versions
    delta = delta_of(base, target, tmp_path / "delta.bin")
    manifest = read_manifest(delta)
    assert [(t.name, t.dtype, t.shape) for t in manifest.tensors] == [
        ("delta", "uint8", (delta.num_bytes,))
    ]
    assert not list(wrong_buckets(memoryview(Path(delta.path).read_bytes()), manifest))
    offer = offer_of(delta, opened(delta).manifest)
    assert (offer.base, offer.target, offer.digest) == (base.digest, target.digest, delta.digest)
    assert offer.manifest_bytes == Path(delta.manifest_path).stat().st_size


def test_a_delta_of_more_than_a_bucket_has_the_digests_of_its_file(tmp_path):
    parts = [bytes([i]) * (BUCKET_BYTES + 1) for i in range(3)]
    sizes = tuple(map(len, parts))
    manifest = DeltaManifest("a" * 64, "b" * 64, 3 * BUCKET_BYTES, sizes)
    packed = pack(tmp_path / "delta.bin", 4, manifest, parts)
    assert not list(
        wrong_buckets(memoryview(Path(packed.path).read_bytes()), read_manifest(packed))
    )
    assert opened(packed).manifest == manifest
    assert [bytes(opened(packed).bucket(i)) for i in range(3)] == parts


def test_a_chain_leads_over_several_versions_but_without_a_link_is_none(versions, tmp_path):
    first = delta_of(versions[0], versions[1], tmp_path / "1.bin")
    second = delta_of(versions[1], versions[2], tmp_path / "2.bin")
    whole = Path(versions[2].path).read_bytes()
    assert patched(versions[0], [first, second], versions[2]) == whole
    with pytest.raises(WeightsError, match="is followed by one from"):
        patched(versions[0], [second, first], versions[2])
    with pytest.raises(WeightsError, match="deltas that lead to"):
        patched(versions[0], [first], versions[2])
    with pytest.raises(WeightsError, match="a delta of versions of"):
        check_chain([opened(first).manifest], versions[0].digest, versions[1].digest, 5)


def test_equal_versions_have_a_delta_of_no_bytes(versions, tmp_path):
    delta = delta_of(versions[0], versions[0], tmp_path / "delta.bin")
    assert opened(delta).manifest.num_bytes == 0
    assert patched(versions[0], [delta], versions[0]) == Path(versions[0].path).read_bytes()


def test_shares_of_several_ranks_are_what_one_writes(versions, tmp_path):
    base, target, _ = versions
    tensors = read_manifest(target).tensors
    whole = opened(delta_of(base, target, tmp_path / "delta.bin", threads=1))
    before, after = (memoryview(Path(v.path).read_bytes()) for v in (base, target))
    shares = [list(encode_buckets(before, after, tensors, range(r, 3, 2), 2)) for r in (0, 1)]
    assert [shares[i % 2][i // 2] for i in range(3)] == [whole.bucket(i) for i in range(3)]


def test_a_wrong_base_is_noticed(versions, tmp_path):
    delta = opened(delta_of(versions[0], versions[1], tmp_path / "delta.bin"))
    with pytest.raises(WeightsError, match="bucket 0, patched: digest differs"):
        patch_version(versions[2], [delta], read_manifest(versions[1]))


@pytest.mark.parametrize("num_buckets", [3, *e2e([10])])  # found while it is encoded; before
def test_a_delta_that_does_not_pay_is_given_up(tmp_path, num_buckets):
    random = np.random.default_rng(0)
    size = num_buckets * BUCKET_BYTES
    tensors = plan([("w", "float32", (size // 4,))])
    files = [VersionFile(i, str(i) * 64, size, str(tmp_path / f"{i}.bin"), "") for i in range(2)]
    for file, data in zip(files, (bytes(size), random.bytes(size)), strict=True):
        Path(file.path).write_bytes(data)
    assert write_delta(*files, tensors, tmp_path / "delta.bin", threads=2) is None
    assert not (tmp_path / "delta.bin").exists()


@pytest.mark.parametrize(("share", "expected"), [(0.0, True), (0.02, True), (1.0, False)])
def test_whether_it_pays_is_seen_by_some_slices(share, expected):
    random = np.random.default_rng(0)
    size = 9 * BUCKET_BYTES
    tensors = plan([("w", "bfloat16", (size // 2,))])
    target = random.integers(0, 1 << 16, size // 2, np.uint16) * (random.random(size // 2) < share)
    flat = memoryview(target.astype(np.uint16)).cast("B")
    assert may_be_small(memoryview(bytes(size)), flat, tensors) is expected
    assert MAX_DELTA_RATIO == 0.5


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZES)), st.integers(0, 200)), min_size=1))
def test_element_runs_are_those_of_the_tensors(entries):
    tensors = plan((f"{i:03}", dtype, (n,)) for i, (dtype, n) in enumerate(entries))
    size = num_bytes(tensors)
    sizes = [0] * size
    for t in tensors:
        sizes[t.offset : t.offset + t.num_bytes] = [t.itemsize] * t.num_bytes
    for start in range(0, size, 256):
        end = min(start + 256, size)
        runs = element_runs(tensors, start, end)
        assert runs[0][0] == 0
        assert list(runs) == sorted(runs, key=lambda run: run[0])
        for at in range(start, end):
            found = [n for first, n in runs if first <= at - start][-1]
            assert sizes[at] in (0, found)  # 0: between two tensors


MANIFEST = DeltaManifest("a" * 64, "b" * 64, BUCKET_BYTES + 10, (3, 2))


def written(path: Path, data: bytes) -> PackedDelta:
    path.write_bytes(data)
    return open_packed(path, len(data))


def test_what_was_packed_is_read_back(tmp_path):
    found = written(tmp_path / "delta", header(MANIFEST) + b"abcde")
    assert (found.manifest, bytes(found.bucket(0)), bytes(found.bucket(1))) == (
        MANIFEST,
        b"abc",
        b"de",
    )
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(WeightsError, match="has 5 bytes, not 6"):
        open_packed(tmp_path / "short", 6)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "a delta of 0 bytes"),
        (b"\x01", "a delta of 1 bytes"),
        (b"\xff" * 8, "a delta of 8 bytes with a manifest of 18446744073709551615"),
        (header(MANIFEST)[:-1], "with a manifest of"),
        (bytes([3]) + bytes(20), "cannot be read"),
        (header(MANIFEST) + b"abcd", "a delta with 4 bytes for 5"),
        (header(MANIFEST) + b"abcdef", "a delta with 6 bytes for 5"),
    ],
)
def test_a_file_that_is_no_delta_is_refused(tmp_path, data, reason):
    with pytest.raises(WeightsError, match=reason):
        written(tmp_path / "delta", data)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": (1,)}, "a delta of 1 buckets for a version of"),
        ({"sizes": (1, 2, 3)}, "a delta of 3 buckets for a version of"),
        ({"version_bytes": 0, "sizes": ()}, "for a version of 0 bytes"),
        ({"version_bytes": 1 << 50}, "for a version of 1125899906842624 bytes"),
        ({"sizes": (BUCKET_BYTES + 2, 1)}, "a delta of 8388610 bytes for bucket 0 of 8388608"),
        ({"sizes": (1, 12)}, "a delta of 12 bytes for bucket 1 of 10 bytes"),
        ({"sizes": (-1, 1)}, "cannot be read"),
        ({"base": "a" * 1000}, "cannot be read"),
    ],
)
def test_an_impossible_manifest_is_refused(tmp_path, changes, reason):
    with pytest.raises(WeightsError, match=reason):
        written(tmp_path / "delta", header(replace(MANIFEST, **changes)) + b"a")
