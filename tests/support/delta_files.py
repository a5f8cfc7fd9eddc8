"""Files of deltas made by one process that has both versions; ranks make theirs together."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightrl.messages.weights import DeltaOffer
from lightrl.weights.delta.encoding import Bytes
from lightrl.weights.delta.file import (
    MAX_DELTA_RATIO,
    DeltaManifest,
    PackedDelta,
    encode_buckets,
    header,
    may_be_small,
    seal,
)
from lightrl.weights.delta.patch import Patch
from lightrl.weights.machine.local import CHUNK_BYTES
from lightrl.weights.version.layout import TensorSpec, num_buckets, num_bytes
from lightrl.weights.version.manifest import Manifest, VersionFile


def write_delta(
    base: VersionFile,
    target: VersionFile,
    tensors: tuple[TensorSpec, ...],
    out: Path,
    threads: int,
) -> tuple[VersionFile, DeltaManifest] | None:
    """Writes to `out` what makes `target` of `base`, which both have these tensors: for one process
    that has both.

    None, and no file, as soon as it is clear that it does not pay (MAX_DELTA_RATIO). Raises
    WeightsError if a file is not of that size, OSError; then there is no file, either.
    """
    size = num_bytes(tensors)
    before, after = (memoryview(Path(file.path).read_bytes()) for file in (base, target))
    if not may_be_small(before, after, tensors):
        return None
    parts: list[bytes] = []
    total = 0
    for data in encode_buckets(before, after, tensors, range(num_buckets(size)), threads):
        total += len(data)
        if total > MAX_DELTA_RATIO * size:
            return None
        parts.append(data)
    manifest = DeltaManifest(base.digest, target.digest, size, tuple(map(len, parts)))
    return pack(out, target.policy_version, manifest, parts), manifest


def patch_version(base: VersionFile, deltas: Sequence[PackedDelta], target: Manifest) -> bytes:
    """What a node makes of a version that is here and the deltas to a later one. Raises
    WeightsError."""
    out = bytearray(target.num_bytes)
    buffer = memoryview(bytearray(CHUNK_BYTES))

    def write(data: memoryview, position: int) -> None:
        out[position : position + len(data)] = data

    with Path(base.path).open("rb") as file:
        patch = Patch(file.fileno(), deltas)
        for bucket in range(target.num_buckets):
            patch.make(target, bucket, buffer, write)
    return bytes(out)


def pack(
    out: Path, policy_version: int, manifest: DeltaManifest, parts: Iterable[Bytes]
) -> VersionFile:
    """Writes a delta's file to `out`, and beside it the manifest with which it travels: `parts` are
    the encoded buckets, in order. To be offered by `offer_of`.

    Raises OSError; then there is no file.
    """
    with _removed_on_failure(out):
        with out.open("wb") as file:
            file.writelines((header(manifest), *parts))
        return seal(out, policy_version)


def offer_of(file: VersionFile, manifest: DeltaManifest) -> DeltaOffer:
    """How nodes are told of a delta that `pack` has written."""
    size = file.manifest_bytes()
    return DeltaOffer(manifest.base, manifest.target, file.digest, size, file.num_bytes)


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
