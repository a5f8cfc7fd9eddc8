"""The delta between two buckets of equal layout: which elements changed, and by how much.

Owns the encoding of one bucket. Lossless. Positions are the gaps between changed elements, values
the differences of the elements' integer representations (one unit in the last place of a float is
1), with the sign in the lowest bit. Both are split into planes, one for each byte of a number, so
that each stream is of one kind and `zstandard` gets near its entropy.

An encoded bucket is b"" (nothing changed), or a byte of its kind and

- SPARSE: for each size of elements a block: `_HEADER` (bytes of an element, number of changed
  elements), `_STORED` for each stream (its length here: that of the stream if it is stored as it
  is, less if by zstandard, 0 if it is zero), then the streams, of a byte for each changed element:
  the planes of gaps and those of values, from the lowest byte on;
- RAW or ZSTD: the new bucket as it is, or by zstandard, where a difference would not be smaller.

Must not import torch.
"""

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from lightrl.errors import WeightsError
from lightrl.weights.version.layout import BUCKET_BYTES

Bytes: TypeAlias = bytes | bytearray | memoryview
# (start in the bucket, bytes of an element) in ascending order, the first at 0; or of all of it
Runs: TypeAlias = tuple[tuple[int, int], ...]
Array: TypeAlias = NDArray[Any]

SPARSE, RAW, ZSTD = 1, 2, 3
# of what a bucket of n bytes may become: n + OVERHEAD_BYTES
OVERHEAD_BYTES = 1

_INTEGERS: dict[int, Any] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_GAP_BYTES = 4
_HEADER = struct.Struct("<BI")
_STORED = struct.Struct("<I")
_LEVEL = 1  # of zstandard; higher ones find nothing more in such streams

_local = threading.local()


def encode_bucket(base: Bytes, target: Bytes, elements: int | Runs) -> bytes:
    """Encode the delta from `base` to `target`; b"" if they are equal. `elements`: bytes of an
    element (2, 4, else 1), or a run for each range of the bucket. At most OVERHEAD_BYTES longer
    than the bucket.

    Takes at most some 24 bytes of memory for each changed element. Lets other threads run.
    """
    size = len(target)
    if len(base) != size or size > BUCKET_BYTES:
        raise WeightsError(f"a bucket of {size} bytes differs from one of {len(base)}")
    found: dict[int, list[tuple[Array, Array]]] = {}  # by bytes of an element
    for itemsize, start, end in _ranges(elements, size):
        before, after = (
            np.frombuffer(memoryview(data)[start:end], _INTEGERS[itemsize])
            for data in (base, target)
        )
        changed = np.flatnonzero(before != after)
        if len(changed):
            # unlike before[changed], `take` lets other threads run
            differences = after.take(changed) - before.take(changed)  # wraps, as on the way back
            found.setdefault(itemsize, []).append((changed + start // itemsize, differences))
    if not found:
        return b""
    parts = [bytes((SPARSE,))]
    for n in sorted(found, reverse=True):
        positions, differences = map(np.concatenate, zip(*found[n], strict=True))
        parts += _encode_block(positions, differences)
    if sum(map(len, parts)) <= size:
        return b"".join(parts)
    whole = _zstd().compress(target)
    if len(whole) < size:
        return bytes((ZSTD,)) + whole
    return bytes((RAW,)) + bytes(target)


@dataclass(frozen=True, slots=True)
class BucketChange:
    """A decoded bucket."""

    # by size of elements: which ones changed, ascending, and their differences
    blocks: tuple[tuple[Array, Array], ...]
    # or all bytes of the new bucket
    whole: Array | None = None

    def apply(self, out: bytearray | memoryview, start: int = 0) -> None:
        """Change a slice of the base into that of the new bucket. It begins with byte `start`, a
        multiple of 8, and ends with one or with the bucket. Lets other threads run."""
        new = np.frombuffer(out, np.uint8)
        if self.whole is not None:
            np.copyto(new, self.whole[start : start + len(new)])
        for positions, differences in self.blocks:
            itemsize = differences.itemsize
            elements = new[: len(new) - len(new) % itemsize].view(differences.dtype)
            begin = start // itemsize
            ends = np.array((begin, begin + len(elements)), positions.dtype)
            first, last = np.searchsorted(positions, ends)
            elements[positions[first:last] - ends[0]] += differences[first:last]


def decode_bucket(delta: Bytes, size: int) -> BucketChange:
    """Decode the delta of a bucket of `size` bytes. May keep a reference to `delta`.

    The result is verified by the target's digest. Raises WeightsError for bytes that
    `encode_bucket` cannot have made for this size. Never takes more than some 16 bytes of memory
    for each element.
    """
    delta = memoryview(delta)
    if len(delta) > size + OVERHEAD_BYTES:
        raise WeightsError(f"a delta of {len(delta)} bytes for a bucket of {size}")
    kind = delta[0] if delta else SPARSE
    if kind == SPARSE:
        return BucketChange(tuple(_blocks(delta[1:], size)))
    if kind == RAW:
        if len(delta) - 1 != size:
            raise WeightsError(f"a delta with {len(delta) - 1} of a bucket's {size} bytes")
        return BucketChange((), np.frombuffer(delta[1:], np.uint8))
    if kind == ZSTD:
        return BucketChange((), _unzip(delta[1:], size))
    raise WeightsError(f"a delta of unknown kind {kind}")


def _ranges(elements: int | Runs, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (bytes of an element, start, end) of the ranges of a bucket, whose starts are multiples
    of 8. Odd bytes at the end of one are bytes."""
    runs = ((0, elements),) if isinstance(elements, int) else elements
    for (start, wanted), (following, _) in pairwise((*runs, (size, 1))):
        itemsize, end = wanted if wanted in _INTEGERS else 1, min(following, size)
        if start < end:
            whole = end - (end - start) % itemsize
            yield itemsize, start, whole
            yield 1, whole, end


def _encode_block(positions: Array, differences: Array) -> list[bytes]:
    itemsize = differences.itemsize
    gaps = (np.diff(positions, prepend=-1) - 1).astype(f"<u{_GAP_BYTES}")
    sign = differences >> (8 * itemsize - 1)
    values = (differences << 1) ^ np.negative(sign)
    planes = [*_planes(gaps), *_planes(values)]
    stored = [_stored(plane) for plane in planes]
    header = _HEADER.pack(itemsize, len(gaps))
    return [header, b"".join(_STORED.pack(len(s)) for s in stored), *stored]


def _planes(numbers: Array) -> Array:
    """Return the bytes of the numbers, the lowest ones first."""
    return numbers.view(np.uint8).reshape(len(numbers), -1).T


def _stored(plane: Array) -> bytes:
    if not plane.any():
        return b""
    data = plane.tobytes()
    smaller = _zstd().compress(data)
    return smaller if len(smaller) < len(data) else data


def _blocks(data: memoryview, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield positions and differences of each block of a bucket of `size` bytes."""
    previous = max(_INTEGERS) + 1
    while data:
        if len(data) < _HEADER.size:
            raise WeightsError("a delta is cut short")
        itemsize, count = _HEADER.unpack_from(data)
        if itemsize not in _INTEGERS or itemsize >= previous:
            raise WeightsError(f"a delta of elements of {itemsize} bytes")
        previous = itemsize
        num_elements = size // itemsize
        if not 0 < count <= num_elements:
            raise WeightsError(f"a delta of {count} elements of {num_elements}")
        streams = data[_HEADER.size :]
        at = _STORED.size * (_GAP_BYTES + itemsize)
        table, data = streams[:at], streams[at:]
        if len(table) < at:
            raise WeightsError("a delta is cut short")
        gaps = np.zeros(count, _INTEGERS[_GAP_BYTES])
        values = np.zeros(count, _INTEGERS[itemsize])
        for plane, (stored,) in zip(
            (*_planes(gaps), *_planes(values)), _STORED.iter_unpack(table), strict=True
        ):
            if stored > min(count, len(data)):
                raise WeightsError(f"a delta stores {stored} bytes for {count}, has {len(data)}")
            part, data = data[:stored], data[stored:]
            if stored == count:
                plane[:] = np.frombuffer(part, np.uint8)
            elif stored:
                plane[:] = _unzip(part, count)
        yield _positions(gaps, num_elements), _differences(values)


def _positions(gaps: Array, num_elements: int) -> Array:
    """Return the positions of the changed elements, ascending."""
    if int(gaps.sum(dtype=np.int64)) + len(gaps) > num_elements:
        raise WeightsError(f"a delta beyond the end of {num_elements} elements")
    positions = np.cumsum(gaps, dtype=np.int32)
    positions += np.arange(len(gaps), dtype=np.int32)
    return positions


def _differences(values: Array) -> Array:
    sign = np.negative(values & 1)
    values >>= 1
    values ^= sign
    return values


def _zstd() -> zstandard.ZstdCompressor:
    """The compressor of this thread."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return _local.compressor


def _unzip(data: memoryview, length: int) -> Array:
    """Decompress exactly one frame of so many bytes; its header is checked before memory is
    taken."""
    try:
        if zstandard.frame_content_size(data) != length:
            raise WeightsError(f"a delta whose compressed part is not one of {length} bytes")
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor(max_window_size=BUCKET_BYTES)
        plain = _local.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise WeightsError(f"a delta cannot be decompressed: {e}") from None
    if len(plain) != length:
        raise WeightsError(f"a delta whose compressed part has {len(plain)} bytes, not {length}")
    return np.frombuffer(plain, np.uint8)
