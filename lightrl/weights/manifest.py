"""What a published version of the weights consists of, and how equality is proved: the digests.

A version is one flat file: its buckets back to back, each a run of whole tensors. Digests are
BLAKE2b-128 over the bucket's bytes; the version's digest covers names, dtypes, shapes and all
bucket digests, but not the version number, so equal weights have equal digests. Must not import
torch.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

from lightrl.errors import WeightsError
from lightrl.messages import (
    MAX_BUCKETS,
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_TENSORS,
    Bucket,
    Manifest,
    TensorSpec,
)

BUCKET_BYTES = 64 << 20
ALIGNMENT = 64  # bytes; tensors start at multiples of it, so that views into a bucket are aligned


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest of one bucket. Releases the GIL, so buckets can be digested by threads."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_version(tensors: Sequence[TensorSpec], bucket_digests: Sequence[str]) -> str:
    """Digest of a whole version from its tensor table and the digests of its buckets."""
    table = hashlib.blake2b(digest_size=16)
    for t in tensors:
        table.update(f"{t.name} {t.dtype} {t.shape} {t.bucket} {t.offset}\n".encode())
    for digest in bucket_digests:
        table.update(digest.encode())
    return table.hexdigest()


@dataclass(frozen=True)
class TensorBytes:
    """One tensor on its way into a version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_version(
    path: Path,
    policy_version: int,
    tensors: Iterable[TensorBytes],
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest:
    """Writes a version to `path` and returns its manifest. Holds one bucket in memory at a time."""
    specs: list[TensorSpec] = []
    buckets: list[Bucket] = []
    pending = bytearray()

    def flush(file: IO[bytes]) -> None:
        file.write(pending)
        buckets.append(Bucket(len(pending), digest_bytes(pending)))
        pending.clear()

    with path.open("wb") as file:
        for t in tensors:
            data = t.data.cast("B")
            if pending and len(pending) + len(data) > bucket_bytes:
                flush(file)
            pending += bytes(-len(pending) % ALIGNMENT)
            specs.append(TensorSpec(t.name, t.dtype, t.shape, len(buckets), len(pending)))
            pending += data
        if pending:
            flush(file)
    if not specs:
        raise WeightsError(f"version {policy_version} has no tensors")
    digest = digest_version(specs, [b.digest for b in buckets])
    return Manifest(policy_version, digest, tuple(specs), tuple(buckets))


def num_bytes(manifest: Manifest) -> int:
    return sum(b.size for b in manifest.buckets)


def bucket_offsets(manifest: Manifest) -> list[int]:
    """Where each bucket starts in the version's file, in bytes."""
    offsets, position = [], 0
    for b in manifest.buckets:
        offsets.append(position)
        position += b.size
    return offsets


def read_buckets(path: Path, manifest: Manifest) -> Iterator[bytearray]:
    """The buckets of a version's file, each verified. Raises WeightsError for a wrong or short
    one."""
    with path.open("rb") as file:
        for i, bucket in enumerate(manifest.buckets):
            data = bytearray(bucket.size)
            if file.readinto(data) != bucket.size:
                raise WeightsError(
                    f"{path}: bucket {i} of version {manifest.policy_version} is cut short"
                )
            if digest_bytes(data) != bucket.digest:
                raise WeightsError(
                    f"{path}: bucket {i} of version {manifest.policy_version}: digest differs"
                )
            yield data


def verify(manifest: Manifest) -> None:
    """Raises WeightsError if the manifest contradicts itself or is none that a trainer could have
    made.

    Before anything of the sizes that it states is allocated. What has come over the wire may be
    anything.
    """
    what = f"manifest of version {manifest.policy_version}"
    if not 0 <= manifest.policy_version < 1 << 63:
        raise WeightsError(f"{what}: there is no such version")
    if not 0 < len(manifest.tensors) <= MAX_TENSORS or not 0 < len(manifest.buckets) <= MAX_BUCKETS:
        raise WeightsError(
            f"{what}: {len(manifest.tensors)} tensors in {len(manifest.buckets)} buckets"
        )
    if any(not 0 < b.size < 1 << 48 for b in manifest.buckets):
        raise WeightsError(f"{what}: a bucket of impossible size")
    for t in manifest.tensors:
        if not _fits(t, manifest):
            raise WeightsError(f"{what}: tensor {t.name[:80]!r} does not fit into its bucket")
    if digest_version(manifest.tensors, [b.digest for b in manifest.buckets]) != manifest.digest:
        raise WeightsError(f"manifest of version {manifest.policy_version}: digest differs")


def _fits(t: TensorSpec, manifest: Manifest) -> bool:
    """No element of any dtype is smaller than a byte."""
    if len(t.name) > MAX_NAME or len(t.shape) > MAX_DIMENSIONS or any(n < 0 for n in t.shape):
        return False
    if not 0 <= t.bucket < len(manifest.buckets):
        return False
    return (
        t.offset >= 0
        and t.offset % ALIGNMENT == 0
        and t.offset + prod(t.shape) <= manifest.buckets[t.bucket].size
    )
