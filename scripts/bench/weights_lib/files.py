"""Versions of a given size in shared memory."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lightrl.weights.version.layout import BUCKET_BYTES, bucket_range, num_buckets, num_bytes, plan
from lightrl.weights.version.manifest import (
    Manifest,
    VersionFile,
    digest_version,
    encode,
    hash_bucket,
    manifest_path,
)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="bench-weights-", dir=root) as path:
        yield Path(path)


def make(path: Path, mb: int) -> VersionFile:
    """Of one tensor of arbitrary bytes, written bucket by bucket."""
    specs = plan([("weight", "uint8", (mb * 1_000_000,))])
    size, digests, block = num_bytes(specs), bytearray(), bytearray(os.urandom(BUCKET_BYTES))
    with path.open("wb") as file:
        for i in range(num_buckets(size)):
            start, end = bucket_range(i, size)
            block[:8] = i.to_bytes(8, "little")
            part = memoryview(block)[: end - start]
            digests += hash_bucket(part)
            file.write(part)
    encoded = encode(Manifest(specs, size, bytes(digests)))
    manifest_path(path).write_bytes(encoded)
    return VersionFile(1, digest_version(encoded), size, str(path), str(manifest_path(path)))
