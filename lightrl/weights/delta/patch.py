"""A version made of an older one and the deltas between them, bucket by bucket.

Owns what is open of them. The older one may be incomplete or wrong, and so may the deltas: each
bucket is proved by the digests of the version that it is to be one of. Must not import torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from lightrl.errors import WeightsError
from lightrl.weights.delta.encoding import decode_bucket
from lightrl.weights.delta.file import PackedDelta
from lightrl.weights.version.layout import bucket_range
from lightrl.weights.version.manifest import Manifest
from lightrl.weights.version.write import Write


@dataclass(eq=False)
class Patch:
    """`make` may be called by many threads.

    `base`: an open file, which stays its owner's. `is_complete`: all of it should be right,
    so that a bucket which cannot be made is an error.
    """

    _base: int
    _is_complete: bool
    _deltas: Sequence[PackedDelta]
    _target: Manifest

    def make(self, bucket: int, buffer: memoryview, write: Write) -> bool:
        """Writes a bucket by portions of `buffer` and proves it. False: that could not be, and what
        was written is of no use. Raises WeightsError if it should have been, OSError."""
        try:
            self._make(bucket, buffer, write)
        except WeightsError:
            if self._is_complete:
                raise
            return False
        return True

    def _make(self, bucket: int, buffer: memoryview, write: Write) -> None:
        """Each portion stays in a core's cache from reading to writing it."""
        start, end = bucket_range(bucket, self._target.num_bytes)
        changes = [decode_bucket(delta.bucket(bucket), end - start) for delta in self._deltas]
        digest = blake3()
        for position in range(start, end, len(buffer)):
            out = buffer[: end - position]
            _read(self._base, out, position)
            for change in changes:
                change.apply(out, position - start)
            digest.update(out)
            write(out, position)
        if digest.digest() != self._target.digest_of(bucket):
            raise WeightsError(f"bucket {bucket}, patched: digest differs")


def _read(file: int, out: memoryview, position: int) -> None:
    """Into memory that is warm already: a new mapping would cost a fault for each page."""
    while out:
        n = os.preadv(file, [out], position)
        if not n:
            raise WeightsError(f"the version that is to be patched ends at byte {position}")
        out, position = out[n:], position + n
