"""A version made of an older one and the deltas between them, bucket by bucket.

The older one and the deltas may be wrong: each bucket is verified by
the digests of the version that is made. Must not import torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from lightrl.errors import WeightsError
from lightrl.weights.delta.encoding import decode_bucket
from lightrl.weights.delta.file import PackedDelta, check_chain, open_packed
from lightrl.weights.version.layout import bucket_range
from lightrl.weights.version.manifest import Manifest, VersionFile
from lightrl.weights.version.write import Write


@dataclass(eq=False)
class Patch:
    """Makes and verifies buckets of a version. `make` may be called by several threads."""

    _base: int  # an open file, which the caller closes
    _deltas: Sequence[PackedDelta]

    def make(self, target: Manifest, bucket: int, buffer: memoryview, write: Write) -> None:
        """Write a bucket by portions of `buffer`, which stay in a core's cache, and verify it.
        Raises WeightsError, OSError."""
        start, end = bucket_range(bucket, target.num_bytes)
        changes = [decode_bucket(delta.bucket(bucket), end - start) for delta in self._deltas]
        digest = blake3()
        for position in range(start, end, len(buffer)):
            out = buffer[: end - position]
            _read(self._base, out, position)
            for change in changes:
                change.apply(out, position - start)
            digest.update(out)
            write(out, position)
        if digest.digest() != target.digest_of(bucket):
            raise WeightsError(f"bucket {bucket}, patched: digest differs")


def open_patch(
    descriptor: int, base: str, target: str, num_bytes: int, files: Sequence[VersionFile]
) -> Patch:
    """The patch by these files of deltas, oldest first, from the version `base`, which is open, to
    `target`. Raises WeightsError, OSError."""
    deltas = [open_packed(Path(file.path), file.num_bytes) for file in files]
    check_chain([delta.manifest for delta in deltas], base, target, num_bytes)
    return Patch(descriptor, deltas)


def _read(file: int, out: memoryview, position: int) -> None:
    """Into memory that is in use: a new mapping would cost a fault for each page."""
    while out:
        n = os.preadv(file, [out], position)
        if not n:
            raise WeightsError(f"the version that is to be patched ends at byte {position}")
        out, position = out[n:], position + n
