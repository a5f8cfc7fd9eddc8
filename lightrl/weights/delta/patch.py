"""A version made of an older one and the deltas between them, bucket by bucket.

Owns what is open of them. The older one may be incomplete or wrong, and so may the deltas: each
bucket is proved by the digests of the version that it is to be one of. Must not import torch.
"""

import os
from collections.abc import Sequence

from lightrl.errors import WeightsError
from lightrl.weights.delta.file import PackedDelta, patch_bucket
from lightrl.weights.version.layout import bucket_range
from lightrl.weights.version.manifest import Manifest


class Patch:
    """`make` may be called by many threads."""

    def __init__(
        self, base: int, is_complete: bool, deltas: Sequence[PackedDelta], target: Manifest
    ) -> None:
        """`base`: an open file, which stays its owner's. `is_complete`: all of it should be right,
        so that a bucket which cannot be made is an error."""
        self._base = base
        self._is_complete = is_complete
        self._deltas = deltas
        self._target = target

    def make(self, bucket: int, out: memoryview) -> bool:
        """Fills `out` with a bucket and proves it. False: that could not be. Raises WeightsError if
        it should have been, OSError."""
        start, _ = bucket_range(bucket, self._target.num_bytes)
        encoded = [delta.bucket(bucket) for delta in self._deltas]
        try:
            _read(self._base, out, start)
            patch_bucket(out, encoded, out, self._target.digest_of(bucket), bucket)
        except WeightsError:
            if self._is_complete:
                raise
            return False
        return True


def _read(file: int, out: memoryview, position: int) -> None:
    """Into memory that is warm already: a new mapping would cost a fault for each page."""
    while out:
        n = os.preadv(file, [out], position)
        if not n:
            raise WeightsError(f"the version that is to be patched ends at byte {position}")
        out, position = out[n:], position + n
