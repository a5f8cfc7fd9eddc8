import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from lightrl.errors import WeightsError
from lightrl.weights.delta.encoding import (
    OVERHEAD_BYTES,
    RAW,
    SPARSE,
    ZSTD,
    decode_bucket,
    encode_bucket,
)
from lightrl.weights.version.layout import BUCKET_BYTES
from tests.support.deltas import apply_bucket, flat_version, measure, trained_versions

BASE = bytes(range(256)) * 16
CHANGED = bytes([BASE[0] ^ 1]) + BASE[1:2000] + bytes(96) + BASE[2096:]


def applied(base: bytes, delta: bytes) -> bytes:
    out = bytearray(len(base))
    apply_bucket(base, delta, out)
    return bytes(out)


@st.composite
def pairs(draw):
    """(base, target, sizes of elements): few or many bytes changed, any size, one run or several"""
    size = draw(st.integers(0, 1500))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    base = random.integers(0, 256, size, np.uint8)
    target = base.copy()
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, size))
        part = target[start : start + draw(st.integers(0, size))]
        part[:] = random.integers(0, 256, len(part)) * (random.random(len(part)) < 0.2) + part
    whole = draw(st.sampled_from([1, 2, 4, 8]))
    starts = sorted(draw(st.sets(st.integers(1, 20).map(lambda n: 64 * n), max_size=5)))
    runs = [(start, draw(st.sampled_from([1, 2, 4, 8]))) for start in [0, *starts]]
    return base.tobytes(), target.tobytes(), whole if draw(st.booleans()) else tuple(runs)


@given(pairs())
@example((b"", b"", 2))
@example((bytes(7), b"\1" * 7, 4))
@example((bytes(4096), bytes(4095) + b"\1", 2))
@example((bytes(1 << 20), bytes((1 << 20) - 9) + b"\1" + bytes(8), 1))  # gaps of many bytes
@example((bytes(4096), b"\0\x80" * 2048, 2))  # the largest difference there is
@example((b"\xff" * 4096, bytes(4096), 4))
def test_what_is_encoded_is_applied(pair):
    base, target, elements = pair
    delta = encode_bucket(base, target, elements)
    assert applied(base, delta) == target
    assert (delta == b"") == (base == target)
    assert len(delta) <= len(target) + OVERHEAD_BYTES
    assert delta == encode_bucket(base, target, elements)
    in_slices, change = bytearray(base), decode_bucket(delta, len(base))
    for start in range(0, len(base), 256):
        change.apply(memoryview(in_slices)[start : start + 256], start)
    assert in_slices == target


@given(st.floats(0.0001, 0.9), st.sampled_from([1, 2, 4]), st.integers(0, 1 << 32))
def test_elements_change_anywhere(share, itemsize, seed):
    random = np.random.default_rng(seed)
    base = random.integers(0, 1 << 8 * itemsize, 20_000, f"u{itemsize}")
    steps = random.integers(-3, 4, len(base)).astype(base.dtype) * (
        random.random(len(base)) < share
    )
    target = base + steps
    delta = encode_bucket(base.tobytes(), target.tobytes(), itemsize)
    assert applied(base.tobytes(), delta) == target.tobytes()


def test_a_bucket_that_is_new_is_sent_as_it_is_or_compressed():
    random = np.random.default_rng(0)
    base, target = random.bytes(5000), random.bytes(5000)
    assert encode_bucket(base, target, 2) == bytes((RAW,)) + target
    text = bytes(random.integers(0, 5, 5000, np.uint8))
    delta = encode_bucket(base, text, 4)
    assert delta[0] == ZSTD
    assert len(delta) < 2500
    assert applied(base, delta) == text


def test_a_trained_model_costs_little_more_than_its_entropy():
    for learning_rate, at_least in ((1e-6, 60), (3e-6, 20)):
        versions = trained_versions(updates=16, learning_rate=learning_rate)
        *_, base, target = (flat_version(v)[1] for v in versions)
        found = measure(memoryview(base), memoryview(target), itemsize=2)
        assert 0.005 < found.changed_share < 0.015 * learning_rate / 1e-6  # else it shows little
        assert found.delta_bytes < 1.15 * found.entropy_bytes
        assert found.full_bytes > at_least * found.delta_bytes


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-3, 1e-2, 0.1])
def test_random_changes_cost_little_more_than_their_entropy(share):
    """However far they lie apart."""
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 16, BUCKET_BYTES // 2, np.uint16)
    chosen = random.random(len(base)) < share
    target = base + chosen * random.choice([1, 65535], len(base)).astype(np.uint16)
    found = measure(memoryview(base).cast("B"), memoryview(target).cast("B"), itemsize=2)
    assert found.delta_bytes < 1.15 * found.entropy_bytes + 300


@given(st.integers(0, 3), st.binary(max_size=200))
def test_random_bytes_are_refused_or_change_only_this_bucket(kind, noise):
    around = bytearray(len(BASE) + 128)
    with suppress(WeightsError):
        apply_bucket(BASE, bytes((kind,)) + noise, memoryview(around)[64:-64])
    assert not any(around[:64] + around[-64:])


@given(st.sampled_from([1, 2, 4]), st.data())
def test_a_delta_with_a_wrong_byte_is_refused_or_harmless(itemsize, data):
    delta = bytearray(encode_bucket(BASE, CHANGED, itemsize))
    for _ in range(data.draw(st.integers(1, 3))):
        delta[data.draw(st.integers(0, len(delta) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WeightsError):
        applied(BASE, bytes(delta))


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_truncated_delta_is_refused(itemsize):
    delta = encode_bucket(BASE, CHANGED, itemsize)
    for length in range(2, len(delta)):
        with pytest.raises(WeightsError):
            applied(BASE, delta[:length])


def sparse(itemsize=2, count=1, stored=(0,) * 6, streams=b"") -> bytes:
    """A delta that no encoder writes."""
    sizes = b"".join(struct.pack("<I", n) for n in stored)
    return bytes((SPARSE,)) + struct.pack("<BI", itemsize, count) + sizes + streams


def frame(length: int, **options) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(bytes(length))


def wide_frame(length: int) -> bytes:
    """A frame of `length` zeros in one repeated byte that says its window has 1 GiB."""
    block = struct.pack("<I", 1 | 1 << 1 | length << 3)[:3] + b"\0"
    return struct.pack("<IBBI", 0xFD2FB528, 0b10_0_0_0_0_00, 20 << 3, length) + block


HUGE = 1 << 24
LIES = [
    ("of unknown kind 9", b"\x09"),
    ("is cut short", sparse()[:5]),
    ("is cut short", sparse(stored=())),
    ("of elements of 3 bytes", sparse(itemsize=3)),
    ("of elements of 2 bytes", sparse() + sparse()[1:]),  # two such blocks
    ("of 0 elements", sparse(count=0)),
    ("of 4294967295 elements", sparse(count=2**32 - 1)),
    ("stores 2 bytes for 1", sparse(stored=(2, 0, 0, 0, 0, 0), streams=b"11")),
    ("stores 1 bytes for 1, has 0", sparse(stored=(1, 0, 0, 0, 0, 0))),
    ("beyond the end of 2048", sparse(stored=(0, 1, 0, 0, 0, 0), streams=b"\x08")),
    ("beyond the end of 2048", sparse(stored=(1, 1, 1, 1, 0, 0), streams=b"\xff" * 4)),
    (
        "is not one of 2048 bytes",
        sparse(count=2048, stored=(400, 0, 0, 0, 0, 0), streams=frame(HUGE)[:400]),
    ),
    ("is not one of 4096 bytes", bytes((ZSTD,)) + frame(HUGE // 4)[:4000]),
    ("is not one of 4096 bytes", bytes((ZSTD,)) + frame(4096, write_content_size=False)),
    ("cannot be decompressed", bytes((ZSTD,)) + wide_frame(4096)[:-1]),
    ("cannot be decompressed", bytes((ZSTD,)) + b"not zstandard"),
    ("cannot be decompressed", bytes((ZSTD,)) + frame(4096)[:-1]),
    ("cannot be decompressed", bytes((ZSTD,)) + frame(4096) + b"more"),
    ("with 10 of a bucket's 4096 bytes", bytes((RAW,)) + bytes(10)),
    ("of 5000 bytes for a bucket of 4096", bytes((RAW,)) + bytes(4999)),
]


@pytest.mark.parametrize(("reason", "delta"), LIES)
def test_lies_are_refused_before_memory_is_taken(reason, delta):
    out = bytearray(len(BASE))
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=reason) as raised:
            apply_bucket(BASE, delta, out)
        assert "\n" not in str(raised.value)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_the_smallest_delta_that_changes_most_takes_little_memory():
    """Everything by 1: some hundred bytes that become a bucket."""
    n = BUCKET_BYTES
    values = zstandard.ZstdCompressor().compress(b"\2" * n)
    delta = sparse(itemsize=1, count=n, stored=(0, 0, 0, 0, len(values)), streams=values)
    out = bytearray(n)
    tracemalloc.start()
    try:
        apply_bucket(bytes(n), delta, out)
        assert tracemalloc.get_traced_memory()[1] < 20 * n
    finally:
        tracemalloc.stop()
    assert out.count(1) == n


def test_buckets_of_unequal_size_have_no_difference():
    with pytest.raises(WeightsError, match="a bucket of 3 bytes differs from one of 2"):
        encode_bucket(bytes(2), bytes(3), 1)
