"""The manifest of a version: its tensors, and the digests by which it is verified.

A version's digest is that of its manifest's bytes, which name every tensor and the digest of every
bucket, but not the version's number: equal weights have equal digests, whatever number of ranks
wrote them. Must not import torch.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from lightrl.errors import ProtocolError, WeightsError
from lightrl.messages.fields import MAX_BUCKETS, MAX_TENSORS, Count, Word
from lightrl.weights.version.layout import TensorSpec, bucket_range, check, num_buckets, num_bytes
from lightrl.wire import from_bytes, to_bytes

DIGEST_BYTES = 32  # BLAKE3-256
MAX_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of a version and the digests of its buckets.

    Example: Manifest((TensorSpec("w", "float32", (4,), 0),), num_bytes=16, digests=<32 bytes>)
    """

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    # of the file
    num_bytes: Count
    # DIGEST_BYTES for each bucket, in order
    digests: Annotated[bytes, Meta(max_length=MAX_BUCKETS * DIGEST_BYTES)]

    @property
    def num_buckets(self) -> int:
        return num_buckets(self.num_bytes)

    def digest_of(self, bucket: int) -> bytes:
        return self.digests[bucket * DIGEST_BYTES : (bucket + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class AdapterManifest(Manifest):
    """The manifest of adapters to the version with the digest `base`; "" = a version by itself.

    A class of its own, so that the digests of other versions do not depend on adapters.
    """

    base: Word = ""


@dataclass(frozen=True, slots=True)
class VersionFile:
    """The files of a version on this machine.

    Example: VersionFile(4, "9f3a...", 2112512, "/dev/shm/.../v4.bin", "/dev/shm/.../v4.manifest")
    """

    policy_version: int
    digest: str
    num_bytes: int
    path: str
    manifest_path: str

    def manifest_bytes(self) -> int:
        """The size of its manifest's file. Raises OSError."""
        return os.stat(self.manifest_path).st_size


def manifest_path(path: Path) -> Path:
    """The path of the manifest of the version at `path`: beside it."""
    return path.with_suffix(".manifest")


def hash_bucket(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256. Releases the GIL, so that buckets can be hashed by threads."""
    return blake3(data).digest()


def hash_buckets(data: memoryview) -> bytes:
    """The digests of all buckets of a whole version, one after the other."""
    ranges = (bucket_range(i, len(data)) for i in range(num_buckets(len(data))))
    return b"".join(hash_bucket(data[start:end]) for start, end in ranges)


def encode(manifest: Manifest) -> bytes:
    """Serialize a manifest, equal ones to the same bytes; `digest_version` of them is the version's
    digest."""
    return to_bytes(manifest)


def digest_version(encoded: bytes) -> str:
    """The digest of a manifest's bytes; hex."""
    return blake3(encoded).hexdigest()


def finish_version(path: Path, policy_version: int, num_bytes: int, encoded: bytes) -> VersionFile:
    """Write a manifest, these bytes, beside the version's file, which is complete. Raises
    OSError."""
    beside = manifest_path(path)
    beside.write_bytes(encoded)
    digest = digest_version(encoded)
    return VersionFile(policy_version, digest, num_bytes, str(path), str(beside))


def require_digest(encoded: bytes, digest: str) -> None:
    """Raises WeightsError unless these are the bytes of the manifest of the version `digest`."""
    if digest_version(encoded) != digest:
        raise WeightsError("the manifest has another digest than the version")


def decode(encoded: bytes, digest: str) -> AdapterManifest:
    """Parse the manifest of the version with this digest. Raises WeightsError for the manifest of
    another version, or one that no trainer could have made."""
    require_digest(encoded, digest)
    try:
        manifest = from_bytes(encoded, AdapterManifest)
    except ProtocolError as e:
        raise WeightsError(f"the manifest cannot be read: {e}") from None
    check(manifest.tensors)
    if manifest.num_bytes != num_bytes(manifest.tensors):
        raise WeightsError(
            f"the manifest has {manifest.num_bytes} bytes, its tensors have "
            f"{num_bytes(manifest.tensors)}"
        )
    if len(manifest.digests) != DIGEST_BYTES * manifest.num_buckets:
        raise WeightsError(
            f"the manifest has {len(manifest.digests)} bytes of digests for "
            f"{manifest.num_buckets} buckets"
        )
    return manifest


def read_manifest(file: VersionFile) -> AdapterManifest:
    """Read and verify the manifest of a version on this machine. Raises WeightsError."""
    return decode(read_encoded(file), file.digest)


def read_encoded(file: VersionFile) -> bytes:
    """Read the bytes of a version's manifest, not verified. Raises WeightsError."""
    path = Path(file.manifest_path)
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise WeightsError(f"{path}: too large for a manifest")
        return path.read_bytes()
    except OSError as e:
        raise WeightsError(f"{file.manifest_path}: cannot be read: {e.strerror}") from e
