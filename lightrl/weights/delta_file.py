"""The difference between two versions as a file, its manifest, and what both are proved by.

A delta file holds the encoded buckets (`delta.py`) back to back, in order; where each begins
follows from the sizes in the manifest. Ranks may encode shares of the buckets, nodes apply single
buckets as they come; whole files are for those that have both versions, or the delta, complete. The
digests of the target's manifest prove the result, whatever base and delta were. Must not import
torch.
"""

import mmap
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from threading import local
from typing import Annotated, BinaryIO, TypeVar

from msgspec import Meta

from lightrl.errors import ProtocolError, WeightsError
from lightrl.messages import MAX_BUCKETS, Count, Word
from lightrl.weights.delta import OVERHEAD_BYTES, Bytes, Runs, apply_bucket, encode_bucket
from lightrl.weights.layout import (
    BUCKET_BYTES,
    MAX_BYTES,
    TensorSpec,
    bucket_range,
    num_buckets,
    num_bytes,
)
from lightrl.weights.manifest import DIGEST_BYTES, Manifest, digest_version, hash_bucket
from lightrl.wire import from_bytes, to_bytes

PAYS_BELOW = 0.5  # of the version's bytes; a larger delta is not worth its work
PROBES = 64  # slices that are encoded first, to see whether the whole may pay
PROBE_BYTES = 64 << 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """What makes the version `target` of the version `base`, bucket by bucket.

    Example: DeltaManifest("9f3a...", "a01c...", 2112512, sizes=(310,), digests=<32 bytes>)
    """

    # digests of the versions, hex
    base: Word
    target: Word
    # of either version
    version_bytes: Count
    # bytes of each encoded bucket; 0 = unchanged
    sizes: Annotated[tuple[Count, ...], Meta(max_length=MAX_BUCKETS)]
    # DIGEST_BYTES for each encoded bucket, in order
    digests: Annotated[bytes, Meta(max_length=MAX_BUCKETS * DIGEST_BYTES)]

    @property
    def num_bytes(self) -> int:
        """Of the delta's file."""
        return sum(self.sizes)

    @property
    def offsets(self) -> list[int]:
        """Where each encoded bucket begins in the delta's file."""
        return [0, *accumulate(self.sizes)][:-1]

    def digest_of(self, bucket: int) -> bytes:
        return self.digests[bucket * DIGEST_BYTES : (bucket + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A delta that is complete on this machine, and where."""

    manifest: DeltaManifest
    path: Path


def encode(manifest: DeltaManifest) -> bytes:
    """The same bytes for equal manifests; `digest_version` of them is the delta's digest."""
    return to_bytes(manifest)


def decode(encoded: bytes, digest: str) -> DeltaManifest:
    """The manifest of the delta with this digest. Raises WeightsError if it is that of another one,
    or none that a trainer could have made."""
    if digest_version(encoded) != digest:
        raise WeightsError("the delta's manifest has another digest than was said")
    try:
        manifest = from_bytes(encoded, DeltaManifest)
    except ProtocolError as e:
        raise WeightsError(f"the delta's manifest cannot be read: {e}") from None
    size = manifest.version_bytes
    count = len(manifest.sizes)
    if not 0 < size <= MAX_BYTES or count != num_buckets(size):
        raise WeightsError(f"a delta of {count} buckets for a version of {size} bytes")
    if len(manifest.digests) != DIGEST_BYTES * count:
        raise WeightsError(
            f"a delta with {len(manifest.digests)} bytes of digests for {count} buckets"
        )
    for i, encoded_bytes in enumerate(manifest.sizes):
        start, end = bucket_range(i, size)
        if encoded_bytes > end - start + OVERHEAD_BYTES:
            raise WeightsError(
                f"a delta of {encoded_bytes} bytes for bucket {i} of {end - start} bytes"
            )
    return manifest


def element_runs(tensors: Sequence[TensorSpec], start: int, end: int) -> Runs:
    """What `encode_bucket` has to know of these bytes of a version's file: sizes of elements."""
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
    """The encoded buckets of these indices, in that order, by so many threads; a few are held at a
    time. `base` and `target` are whole versions of these tensors."""

    def encode_one(index: int) -> bytes:
        return _encode_slice(base, target, tensors, *bucket_range(index, len(target)))

    return _in_order(encode_one, buckets, threads)


def pays(base: memoryview, target: memoryview, tensors: Sequence[TensorSpec]) -> bool:
    """Whether a delta may be worth its work, by some slices of the versions.

    Takes milliseconds, whatever the versions' size. True if they are small: it is soon tried.
    """
    size = len(target)
    if size < 16 * PROBES * PROBE_BYTES:
        return True
    step = size // PROBES // PROBE_BYTES * PROBE_BYTES
    slices = [(i * step, i * step + PROBE_BYTES) for i in range(PROBES)]
    encoded = sum(len(_encode_slice(base, target, tensors, a, b)) for a, b in slices)
    return encoded <= PAYS_BELOW * PROBES * PROBE_BYTES


def write_delta(
    base: Path,
    target: Path,
    digests: tuple[str, str],
    tensors: tuple[TensorSpec, ...],
    out: Path,
    threads: int,
) -> DeltaManifest | None:
    """Writes to `out` what makes the version in `target` of the one in `base`, which have these
    `digests`.

    None, and no file, as soon as it is clear that it does not pay (PAYS_BELOW). Raises
    WeightsError if a file is not such a version, OSError; then there is no file, either.
    """
    size = num_bytes(tensors)
    before, after = _mapped(base, size), _mapped(target, size)
    if not pays(before, after, tensors):
        return None
    sizes: list[int] = []
    proofs: list[bytes] = []
    total = 0
    with _removed_on_failure(out), out.open("wb") as file:
        for data in encode_buckets(before, after, tensors, range(num_buckets(size)), threads):
            total += len(data)
            if total > PAYS_BELOW * size:
                break
            file.write(data)
            sizes.append(len(data))
            proofs.append(hash_bucket(data))
    if total > PAYS_BELOW * size:
        out.unlink()
        return None
    return DeltaManifest(*digests, size, tuple(sizes), b"".join(proofs))


def apply_delta(
    base: Path, deltas: Sequence[DeltaFile], target: Manifest, out: Path, threads: int
) -> None:
    """Writes to `out` the version with the manifest `target`, from `base` and a chain of deltas,
    oldest first. Every bucket is proved by the target's digests.

    Raises WeightsError if a delta or the result is not what it should be, OSError; then there is no
    file.
    """
    check_chain([d.manifest for d in deltas], target)
    encoded = [_mapped(d.path, d.manifest.num_bytes) for d in deltas]
    offsets = [d.manifest.offsets for d in deltas]
    scratch = local()

    def apply_one(index: int) -> None:
        start, end = bucket_range(index, target.num_bytes)
        if not hasattr(scratch, "bucket"):
            scratch.bucket = bytearray(BUCKET_BYTES)
        new = memoryview(scratch.bucket)[: end - start]
        parts: list[Bytes] = []
        for delta, data, at in zip(deltas, encoded, offsets, strict=True):
            part = data[at[index] : at[index] + delta.manifest.sizes[index]]
            if hash_bucket(part) != delta.manifest.digest_of(index):
                raise WeightsError(f"{delta.path}: bucket {index}: digest differs")
            parts.append(part)
        _read_at(source.fileno(), new, start)
        patch_bucket(new, parts, new, target.digest_of(index), index)
        _write_at(file, new, start)

    with _opened(base, target.num_bytes) as source, _removed_on_failure(out):
        file = os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            for _ in _in_order(apply_one, range(target.num_buckets), threads):
                pass
        finally:
            os.close(file)


def patch_bucket(
    base: Bytes, deltas: Sequence[Bytes], out: memoryview, digest: bytes, bucket: int
) -> None:
    """Fills `out`, which may be `base` itself, with the bucket that a chain of encoded ones makes
    of it, and proves it. Raises WeightsError; `out` is then undefined."""
    apply_bucket(base, deltas[0] if deltas else b"", out)
    for delta in deltas[1:]:
        apply_bucket(out, delta, out)
    if hash_bucket(out) != digest:
        raise WeightsError(f"bucket {bucket}, patched: digest differs")


def check_chain(chain: Sequence[DeltaManifest], target: Manifest) -> None:
    """Raises WeightsError unless each delta follows on the one before, and all are of versions of
    the target's size."""
    for older, newer in pairwise(chain):
        if older.target != newer.base:
            raise WeightsError(
                f"a delta to {older.target[:12]} is followed by one from {newer.base[:12]}"
            )
    for delta in chain:
        if delta.version_bytes != target.num_bytes:
            raise WeightsError(
                f"a delta of versions of {delta.version_bytes} bytes for one of {target.num_bytes}"
            )


def _encode_slice(
    base: memoryview, target: memoryview, tensors: Sequence[TensorSpec], start: int, end: int
) -> bytes:
    runs = element_runs(tensors, start, end)
    return encode_bucket(base[start:end], target[start:end], runs)


def _opened(path: Path, size: int) -> BinaryIO:
    file = path.open("rb")
    found = os.fstat(file.fileno()).st_size
    if found != size:
        file.close()
        raise WeightsError(f"{path}: has {found} bytes, not {size}")
    return file


def _mapped(path: Path, size: int) -> memoryview:
    """A file of this size, to be read. Given back with the last view of it."""
    with _opened(path, size) as file:
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))


def _in_order(work: Callable[[int], T], items: Iterable[int], threads: int) -> Iterator[T]:
    """Results in the order of the items; each thread has one more item waiting, so that results
    which nobody has taken yet stay few."""
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _read_at(file: int, out: memoryview, offset: int) -> None:
    """Into memory that is warm already: a new mapping would cost a fault for each page."""
    while out:
        count = os.preadv(file, [out], offset)
        if not count:
            raise WeightsError(f"a version ends at byte {offset}")
        out, offset = out[count:], offset + count


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
