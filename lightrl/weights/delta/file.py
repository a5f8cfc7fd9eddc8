"""The delta between two versions as a file: its format, and how it is read.

A delta is published as a version with one tensor (`TENSOR`), so that it is verified, pulled,
resumed and relayed like one. Its file is

    length of the manifest (8 bytes, little-endian), DeltaManifest, encoded buckets (`encoding.py`)

The DeltaManifest names the two versions; where each bucket begins follows from the sizes. Ranks may
encode shares of the buckets, nodes apply them in any order; the result is verified by the digests
of the target's manifest. Must not import torch.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lightrl.errors import ProtocolError, WeightsError
from lightrl.messages.fields import MAX_BUCKETS, Count, Word
from lightrl.weights.delta.encoding import OVERHEAD_BYTES, Runs, encode_bucket
from lightrl.weights.version.layout import (
    MAX_BYTES,
    TensorSpec,
    bucket_range,
    num_buckets,
    plan,
)
from lightrl.weights.version.manifest import (
    Manifest,
    VersionFile,
    encode,
    finish_version,
    hash_buckets,
)
from lightrl.wire import from_bytes, to_bytes

TENSOR = "delta"  # the one tensor of the file, "uint8"
LENGTH_BYTES = 8
MAX_DELTA_RATIO = 0.5  # of the version's bytes; a larger delta is not worth its work
PROBES = 64  # slices that are encoded first, to estimate the whole
PROBE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """Names the two versions of a delta, and the size of each encoded bucket.

    Example: DeltaManifest("9f3a...", "a01c...", version_bytes=2112512, sizes=(310,))
    """

    # digests of the versions, hex
    base: Word
    target: Word
    # of either version
    version_bytes: Count
    # bytes of each encoded bucket; 0 = unchanged
    sizes: Annotated[tuple[Count, ...], Meta(max_length=MAX_BUCKETS)]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all encoded buckets."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """A delta's file, open. `bucket(i)` are views into the mapped file."""

    manifest: DeltaManifest
    data: memoryview
    # where each bucket begins in `data`, and where the last one ends
    offsets: tuple[int, ...]

    def bucket(self, index: int) -> memoryview:
        return self.data[self.offsets[index] : self.offsets[index + 1]]


def seal(path: Path, policy_version: int) -> VersionFile:
    """Write the manifest of a delta beside its file, which is complete: ranks wrote their parts to
    their places, behind `header`. Reads all of it. Raises OSError."""
    size = path.stat().st_size
    digests = hash_buckets(_mapped(path, size))
    encoded = encode(Manifest(plan([(TENSOR, "uint8", (size,))]), size, digests))
    return finish_version(path, policy_version, size, encoded)


def header(manifest: DeltaManifest) -> bytes:
    """The first bytes of a delta's file; the encoded buckets follow."""
    encoded = to_bytes(manifest)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def open_packed(path: Path, size: int) -> PackedDelta:
    """Map a delta's file of `size` bytes; it is unmapped with the last view of it.

    Raises WeightsError for what no trainer could have made, before memory of a size that it states
    is taken; OSError. `decode_bucket` checks the encoded buckets, `check_chain` the versions.
    """
    data = _mapped(path, size)
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    begin = LENGTH_BYTES + length
    if size < LENGTH_BYTES or begin > size:
        raise WeightsError(f"a delta of {size} bytes with a manifest of {length}")
    try:
        manifest = from_bytes(bytes(data[LENGTH_BYTES:begin]), DeltaManifest)
    except ProtocolError as e:
        raise WeightsError(f"the delta's manifest cannot be read: {e}") from None
    _check(manifest)
    if manifest.num_bytes != size - begin:
        raise WeightsError(f"a delta with {size - begin} bytes for {manifest.num_bytes}")
    return PackedDelta(manifest, data, tuple(accumulate(manifest.sizes, initial=begin)))


def _check(manifest: DeltaManifest) -> None:
    size, count = manifest.version_bytes, len(manifest.sizes)
    if not 0 < size <= MAX_BYTES or count != num_buckets(size):
        raise WeightsError(f"a delta of {count} buckets for a version of {size} bytes")
    for i, encoded_bytes in enumerate(manifest.sizes):
        start, end = bucket_range(i, size)
        if encoded_bytes > end - start + OVERHEAD_BYTES:
            raise WeightsError(
                f"a delta of {encoded_bytes} bytes for bucket {i} of {end - start} bytes"
            )


def element_runs(tensors: Sequence[TensorSpec], start: int, end: int) -> Runs:
    """The sizes of elements in these bytes of a version's file, for `encode_bucket`."""
    runs: list[tuple[int, int]] = []
    first = max(bisect_right(tensors, start, key=lambda t: t.offset) - 1, 0)
    for i in range(first, len(tensors)):
        t = tensors[i]
        if t.offset >= end:
            break
        if not runs or runs[-1][1] != t.itemsize:
            runs.append((max(t.offset - start, 0), t.itemsize))
    return tuple(runs)


def encode_buckets(
    base: memoryview,
    target: memoryview,
    tensors: Sequence[TensorSpec],
    buckets: Iterable[int],
    threads: int,
) -> Iterator[bytes]:
    """Yield the encoded buckets of these indices, in order, by so many threads. `base` and `target`
    are whole versions of these tensors."""

    def encode_one(index: int) -> bytes:
        return _encode_slice(base, target, tensors, *bucket_range(index, len(target)))

    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        yield from pool.map(encode_one, buckets)  # cancelled when this generator is closed


def may_be_small(base: memoryview, target: memoryview, tensors: Sequence[TensorSpec]) -> bool:
    """Return whether a delta may be within MAX_DELTA_RATIO, by some slices of the versions.

    Takes milliseconds, whatever the versions' size. True for small versions, which are encoded as
    fast.
    """
    size = len(target)
    if size < 16 * PROBES * PROBE_BYTES:
        return True
    step = size // PROBES // PROBE_BYTES * PROBE_BYTES
    starts = range(0, PROBES * step, step)
    encoded = sum(len(_encode_slice(base, target, tensors, a, a + PROBE_BYTES)) for a in starts)
    return encoded <= MAX_DELTA_RATIO * PROBES * PROBE_BYTES


def check_chain(chain: Sequence[DeltaManifest], base: str, target: str, size: int) -> None:
    """Raises WeightsError unless these deltas, oldest first, lead from `base` to `target` over
    versions of `size` bytes."""
    at = base
    for delta in chain:
        if delta.base != at:
            raise WeightsError(f"a delta to {at[:12]} is followed by one from {delta.base[:12]}")
        if delta.version_bytes != size:
            raise WeightsError(
                f"a delta of versions of {delta.version_bytes} bytes for one of {size}"
            )
        at = delta.target
    if at != target:
        raise WeightsError(f"deltas that lead to {at[:12]}, not to {target[:12]}")


def _encode_slice(
    base: memoryview, target: memoryview, tensors: Sequence[TensorSpec], start: int, end: int
) -> bytes:
    runs = element_runs(tensors, start, end)
    return encode_bucket(base[start:end], target[start:end], runs)


def _mapped(path: Path, size: int) -> memoryview:
    """A file of this size, mapped until the last view of it is gone."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise WeightsError(f"{path}: has {found} bytes, not {size}")
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
