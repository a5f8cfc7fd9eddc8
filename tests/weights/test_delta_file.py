import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrl.errors import WeightsError
from lightrl.weights.delta_file import (
    PAYS_BELOW,
    DeltaFile,
    DeltaManifest,
    apply_delta,
    decode,
    element_runs,
    encode,
    encode_buckets,
    patch_bucket,
    pays,
    write_delta,
)
from lightrl.weights.layout import BUCKET_BYTES, ITEMSIZES, bucket_range, num_bytes, plan
from lightrl.weights.manifest import VersionFile, digest_version, hash_bucket, read_manifest
from lightrl.weights.write import TensorBytes, write_version

# A tensor across two buckets, small ones of several dtypes between, a head that is tied to the
# embedding and therefore not here, a router's bias, a counter, an odd end.
SHAPES = {
    "embed.weight": ("bfloat16", (4500, 1000)),
    "layers.0.bias": ("float32", (3,)),
    "layers.0.experts": ("float16", (5, 7)),
    "layers.0.router.correction": ("float32", (999,)),
    "layers.0.router.count": ("int64", (9,)),
    "layers.1.weight": ("float32", (3000, 700)),
    "norm.scale": ("float8_e4m3fn", (37,)),
}


def write(path: Path, seed: int, changed: float = 0.01) -> VersionFile:
    """The version `seed`: that before it with about this share of all elements changed by one."""
    random = np.random.default_rng(0)
    tensors = []
    for name, (dtype, shape) in SHAPES.items():
        kind = f"u{ITEMSIZES[dtype]}"
        data = random.integers(0, 1 << 8, (*shape, ITEMSIZES[dtype]), np.uint8).view(kind)
        for s in range(seed):
            steps = np.random.default_rng(s + 1).random(data.shape) < changed
            data = data + steps.astype(kind)
        tensors.append(TensorBytes(name, dtype, shape, memoryview(data).cast("B")))
    return write_version(path, seed, tensors)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[VersionFile]:
    folder = tmp_path_factory.mktemp("versions")
    return [write(folder / f"{i}.bin", i) for i in range(3)]


def delta_of(base: VersionFile, target: VersionFile, path: Path, threads: int = 2) -> DeltaFile:
    tensors = read_manifest(target).tensors
    files, digests = (Path(base.path), Path(target.path)), (base.digest, target.digest)
    manifest = write_delta(*files, digests, tensors, path, threads)
    assert manifest is not None
    return DeltaFile(manifest, path)


def test_a_delta_leads_from_one_version_to_the_next(versions, tmp_path):
    base, target, _ = versions
    delta = delta_of(base, target, tmp_path / "delta")
    assert delta.path.stat().st_size == delta.manifest.num_bytes < target.num_bytes / 20
    assert (delta.manifest.base, delta.manifest.target) == (base.digest, target.digest)
    out = tmp_path / "out"
    apply_delta(Path(base.path), [delta], read_manifest(target), out, threads=2)
    assert out.read_bytes() == Path(target.path).read_bytes()


def test_a_chain_leads_over_several_versions_but_without_a_link_is_none(versions, tmp_path):
    first = delta_of(versions[0], versions[1], tmp_path / "1")
    second = delta_of(versions[1], versions[2], tmp_path / "2")
    out = tmp_path / "out"
    target = read_manifest(versions[2])
    apply_delta(Path(versions[0].path), [first, second], target, out, threads=2)
    assert out.read_bytes() == Path(versions[2].path).read_bytes()
    with pytest.raises(WeightsError, match="is followed by one from"):
        apply_delta(Path(versions[0].path), [second, first], target, tmp_path / "none", threads=1)


def test_equal_versions_have_a_delta_of_no_bytes(versions, tmp_path):
    delta = delta_of(versions[0], versions[0], tmp_path / "delta")
    assert delta.manifest.num_bytes == 0
    manifest = read_manifest(versions[0])
    apply_delta(Path(versions[0].path), [delta], manifest, tmp_path / "out", threads=1)
    assert (tmp_path / "out").read_bytes() == Path(versions[0].path).read_bytes()


def test_shares_of_several_ranks_are_what_one_writes(versions, tmp_path):
    base, target, _ = versions
    tensors = read_manifest(target).tensors
    whole = delta_of(base, target, tmp_path / "delta", threads=1)
    before, after = (memoryview(Path(v.path).read_bytes()) for v in (base, target))
    shares = [list(encode_buckets(before, after, tensors, range(r, 3, 2), 2)) for r in (0, 1)]
    encoded = [shares[i % 2][i // 2] for i in range(3)]
    assert b"".join(encoded) == whole.path.read_bytes()
    # and a node applies one bucket of them, as it came
    start, end = bucket_range(1, target.num_bytes)
    out = memoryview(bytearray(end - start))
    at = whole.manifest.offsets[1]
    part = whole.path.read_bytes()[at : at + whole.manifest.sizes[1]]
    patch_bucket(before[start:end], [part], out, read_manifest(target).digest_of(1), 1)
    assert out == after[start:end]


def test_a_wrong_base_is_noticed_and_nothing_left(versions, tmp_path):
    delta = delta_of(versions[0], versions[1], tmp_path / "delta")
    target, out = read_manifest(versions[1]), tmp_path / "out"
    with pytest.raises(WeightsError, match="bucket 0, patched: digest differs"):
        apply_delta(Path(versions[2].path), [delta], target, out, threads=2)
    assert not out.exists()


def test_a_damaged_delta_is_noticed_and_nothing_left(versions, tmp_path):
    delta = delta_of(versions[0], versions[1], tmp_path / "delta")
    target, base, out = read_manifest(versions[1]), Path(versions[0].path), tmp_path / "out"
    data = bytearray(delta.path.read_bytes())
    data[delta.manifest.offsets[1] + 100] ^= 1
    delta.path.write_bytes(data)
    with pytest.raises(WeightsError, match="delta: bucket 1: digest differs"):
        apply_delta(base, [delta], target, out, threads=2)
    os.truncate(delta.path, len(data) - 1)
    with pytest.raises(WeightsError, match=f"has {len(data) - 1} bytes, not {len(data)}"):
        apply_delta(base, [delta], target, out, threads=2)
    assert not out.exists()


def test_a_base_of_another_size_is_refused(versions, tmp_path):
    delta = delta_of(versions[0], versions[1], tmp_path / "delta")
    (tmp_path / "short").write_bytes(b"short")
    target = read_manifest(versions[1])
    with pytest.raises(WeightsError, match="short: has 5 bytes"):
        apply_delta(tmp_path / "short", [delta], target, tmp_path / "out", threads=1)
    small = DeltaFile(replace(delta.manifest, version_bytes=5), delta.path)
    with pytest.raises(WeightsError, match="a delta of versions of 5 bytes"):
        apply_delta(Path(versions[0].path), [small], target, tmp_path / "out", threads=1)


@pytest.mark.parametrize(
    ("size", "place"),
    [
        (3 * BUCKET_BYTES, "delta"),  # found while it is written
        (10 * BUCKET_BYTES, "no/such/folder/delta"),  # before
    ],
)
def test_a_delta_that_does_not_pay_is_given_up(tmp_path, size, place):
    random = np.random.default_rng(0)
    tensors = plan([("w", "float32", (size // 4,))])
    (tmp_path / "base").write_bytes(bytes(size))
    (tmp_path / "target").write_bytes(random.bytes(size))
    files = tmp_path / "base", tmp_path / "target"
    assert write_delta(*files, ("a", "b"), tensors, tmp_path / place, threads=2) is None
    assert not (tmp_path / place).exists()


@pytest.mark.parametrize(("share", "expected"), [(0.0, True), (0.02, True), (1.0, False)])
def test_whether_it_pays_is_seen_by_some_slices(share, expected):
    random = np.random.default_rng(0)
    size = 9 * BUCKET_BYTES
    tensors = plan([("w", "bfloat16", (size // 2,))])
    target = random.integers(0, 1 << 16, size // 2, np.uint16) * (random.random(size // 2) < share)
    flat = memoryview(target.astype(np.uint16)).cast("B")
    assert pays(memoryview(bytes(size)), flat, tensors) is expected
    assert PAYS_BELOW == 0.5


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


MANIFEST = DeltaManifest(
    "a" * 64, "b" * 64, BUCKET_BYTES + 10, (BUCKET_BYTES + 1, 11), hash_bucket(b"") * 2
)


def test_a_manifest_is_read_back_and_proved():
    encoded = encode(MANIFEST)
    assert decode(encoded, digest_version(encoded)) == MANIFEST
    assert MANIFEST.offsets == [0, BUCKET_BYTES + 1]
    assert MANIFEST.num_bytes == BUCKET_BYTES + 12
    with pytest.raises(WeightsError, match="another digest"):
        decode(encoded, digest_version(encoded + b" "))
    with pytest.raises(WeightsError, match="cannot be read"):
        decode(encoded[:-1], digest_version(encoded[:-1]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": (1,)}, "a delta of 1 buckets for a version of"),
        ({"sizes": (1, 2, 3)}, "a delta of 3 buckets for a version of"),
        ({"version_bytes": 0, "sizes": (), "digests": b""}, "for a version of 0 bytes"),
        ({"version_bytes": 1 << 50}, "for a version of 1125899906842624 bytes"),
        ({"sizes": (BUCKET_BYTES + 2, 1)}, "a delta of 8388610 bytes for bucket 0 of 8388608"),
        ({"sizes": (1, 12)}, "a delta of 12 bytes for bucket 1 of 10 bytes"),
        ({"digests": bytes(63)}, "a delta with 63 bytes of digests for 2 buckets"),
        ({"sizes": (-1, 1)}, "cannot be read"),
        ({"base": "a" * 1000}, "cannot be read"),
    ],
)
def test_an_impossible_manifest_is_refused(changes, reason):
    encoded = encode(replace(MANIFEST, **changes))
    with pytest.raises(WeightsError, match=reason):
        decode(encoded, digest_version(encoded))
