"""The delta between two buckets of equal layout: which elements changed, and by how much.

Owns the encoding of one bucket. Lossless. Positions are the gaps between changed elements, values
the differences of the elements' integer representations (one unit in the last place of a float is
1): sign, and planes of bytes of the magnitude, so that each stream is of one kind and `zstandard`
gets near its entropy.

An encoded bucket is b"" (nothing changed), or a byte of its kind and

- SPARSE: for each size of elements a block: `_HEADER` (bytes of an element, 8 if gaps are split,
  number of changed elements, length of the stream of gaps), `_STORED` for each stream (its length
  here: that of the stream if it is stored as it is, less if by zstandard, 0 if it is zero), then
  the streams: gaps, their low bytes if split, signs, magnitudes from the lowest byte on;
- RAW or ZSTD: the new bucket as it is, or by zstandard, where a difference would not be smaller.

Must not import torch.
"""

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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
_WORD = 8  # bytes that are compared at a time
# words of one step: they stay in a core's cache, and the results fit into memory that malloc reuses
_PORTION = 1 << 17
_ESCAPE = 255  # in the stream of gaps: so many, and the next byte counts, too
_SPLIT = 8  # low bits of a gap that have a stream of their own where few elements changed
_SPLIT_FROM = 512  # mean gap; from here on low bytes are as good as random
_HEADER = struct.Struct("<BBII")
_STORED = struct.Struct("<I")
_LEVEL = 1  # of zstandard; higher ones find nothing more in such streams

_local = threading.local()


def encode_bucket(base: Bytes, target: Bytes, elements: int | Runs) -> bytes:
    """Encode the delta from `base` to `target`; b"" if they are equal. `elements`: bytes of an
    element (2, 4, else 1), or a run for each range of the bucket. At most OVERHEAD_BYTES longer
    than the bucket.

    Takes at most some 16 bytes of memory for each changed element. Lets other threads run.
    """
    size = len(target)
    if len(base) != size or size > BUCKET_BYTES:
        raise WeightsError(f"a bucket of {size} bytes differs from one of {len(base)}")
    found: dict[int, list[tuple[Array, Array]]] = {}  # by bytes of an element
    for words, before, after in _changed_words(base, target):
        for n, chosen in _by_itemsize(words, elements, size):
            changed = _changed_elements(words[chosen], before[chosen], after[chosen], n)
            found.setdefault(n, []).append(changed)
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
class Change:
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


def decode_bucket(delta: Bytes, size: int) -> Change:
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
        return Change(tuple(_blocks(delta[1:], size)))
    if kind == RAW:
        if len(delta) - 1 != size:
            raise WeightsError(f"a delta with {len(delta) - 1} of a bucket's {size} bytes")
        return Change((), np.frombuffer(delta[1:], np.uint8))
    if kind == ZSTD:
        return Change((), _unzip(delta[1:], size))
    raise WeightsError(f"a delta of unknown kind {kind}")


def _changed_words(base: Bytes, target: Bytes) -> Iterator[tuple[Array, Array, Array]]:
    """Indices of the words that differ, and the words before and after, by portions. Bytes behind
    the last whole word count as one, filled up with zeros."""
    whole = len(target) // _WORD
    before = np.frombuffer(base, "<u8", whole)
    after = np.frombuffer(target, "<u8", whole)
    for start in range(0, whole, _PORTION):
        old, new = before[start : start + _PORTION], after[start : start + _PORTION]
        words = np.flatnonzero(old != new)
        if len(words):
            # unlike old[words], `take` lets other threads run
            yield (words + start).astype(np.int32), old.take(words), new.take(words)
    tails = [bytes(memoryview(b)[whole * _WORD :]).ljust(_WORD, b"\0") for b in (base, target)]
    if tails[0] != tails[1]:
        old, new = (np.frombuffer(tail, "<u8") for tail in tails)
        yield np.array([whole], np.int32), old, new


def _by_itemsize(words: Array, elements: int | Runs, size: int) -> list[tuple[int, Any]]:
    """Group the changed words by the size of their elements; a run begins where a word does.

    Odd bytes at the end are bytes.
    """
    runs = ((0, elements),) if isinstance(elements, int) else elements
    starts = np.array([start // _WORD for start, _ in runs])
    sizes = np.array([n if n in _INTEGERS else 1 for _, n in runs], np.uint8)
    kinds = set(sizes.tolist())
    odd = size % _WORD and words[-1] == size // _WORD
    if len(kinds) == 1 and not odd:
        return [(kinds.pop(), slice(None))]
    of_words = sizes[np.searchsorted(starts, words, side="right") - 1]
    if odd:
        of_words[-1] = 1
    return [(n, of_words == n) for n in sorted(set(of_words.tolist()), reverse=True)]


def _changed_elements(
    words: Array, before: Array, after: Array, itemsize: int
) -> tuple[Array, Array]:
    """Return the indices of changed elements in the bucket, and their differences."""
    kind = _INTEGERS[itemsize]
    bits = {1: 3, 2: 2, 4: 1}[itemsize]  # of an element's index in its word
    before, after = before.view(kind), after.view(kind)
    changed = np.flatnonzero(before != after)
    in_words = changed.astype(np.int32)
    positions = (words.take(in_words >> bits) << bits) | (in_words & ((1 << bits) - 1))
    return positions, after.take(changed) - before.take(changed)  # wraps, as on the way back


def _encode_block(positions: Array, magnitudes: Array) -> list[bytes]:
    """`magnitudes`: differences, which are changed in place."""
    kind, itemsize = magnitudes.dtype, magnitudes.itemsize
    gaps = np.diff(positions, prepend=np.int32(-1))
    gaps -= np.int32(1)
    signs = magnitudes >> (8 * itemsize - 1)
    negative = np.negative(signs)  # all bits set where the difference is negative
    magnitudes ^= negative
    magnitudes -= negative
    magnitudes -= kind.type(1)
    split = _SPLIT if int(positions[-1]) >= _SPLIT_FROM * len(gaps) else 0
    streams = [_escaped(gaps >> split)]
    if split:
        streams.append(gaps.astype(np.uint8))
    streams.append(np.packbits(signs.astype(np.uint8)))
    streams += [(magnitudes >> (8 * i)).astype(np.uint8) for i in range(itemsize)]
    stored = [_stored(stream) for stream in streams]
    header = _HEADER.pack(itemsize, split, len(gaps), len(streams[0]))
    return [header, b"".join(_STORED.pack(len(s)) for s in stored), *stored]


def _escaped(gaps: Array) -> Array:
    """Gaps as bytes: as many _ESCAPE as a gap contains, then the rest. Long gaps cost nothing: of
    random positions, every byte of a gap is equally likely."""
    stream = gaps.astype(np.uint8)
    long = np.flatnonzero(gaps >= _ESCAPE)
    escapes, stream[long] = np.divmod(gaps[long], _ESCAPE)
    return np.insert(stream, np.repeat(long, escapes), _ESCAPE) if len(long) else stream


def _stored(stream: Array) -> bytes:
    if not stream.any():
        return b""
    data = stream.tobytes()
    smaller = _zstd().compress(data)
    return smaller if len(smaller) < len(data) else data


def _blocks(data: memoryview, size: int) -> Iterator[tuple[Array, Array]]:
    previous = 8
    while data:
        if len(data) < _HEADER.size:
            raise WeightsError("a delta is cut short")
        itemsize, split, count, num_gaps = _HEADER.unpack_from(data)
        if itemsize not in _INTEGERS or itemsize >= previous or split not in (0, _SPLIT):
            raise WeightsError(f"a delta of elements of {itemsize} bytes, gaps split at {split}")
        previous = itemsize
        num_elements = size // itemsize
        most = count + (num_elements >> split) // _ESCAPE
        if not 0 < count <= num_elements or not count <= num_gaps <= most:
            raise WeightsError(f"a delta of {count} elements of {num_elements}")
        lengths = [num_gaps] + [count] * (split > 0) + [-(-count // 8)] + [count] * itemsize
        streams, data = _read_streams(data[_HEADER.size :], lengths)
        positions = _positions(streams[0], streams[1] if split else None, count, num_elements)
        yield positions, _differences(streams[-itemsize - 1], streams[-itemsize:], count)


def _read_streams(data: memoryview, lengths: list[int]) -> tuple[list[Array], memoryview]:
    """Return the streams of a block, and the bytes behind it."""
    at = _STORED.size * len(lengths)
    if len(data) < at:
        raise WeightsError("a delta is cut short")
    streams: list[Array] = []
    for i, length in enumerate(lengths):
        (stored,) = _STORED.unpack_from(data, _STORED.size * i)
        if stored > min(length, len(data) - at):
            raise WeightsError(f"a delta stores {stored} bytes for {length}, has {len(data) - at}")
        part = data[at : at + stored]
        at += stored
        if not stored:
            streams.append(np.zeros(length, np.uint8))
        elif stored == length:
            streams.append(np.frombuffer(part, np.uint8))
        else:
            streams.append(_unzip(part, length))
    return streams, data[at:]


def _positions(stream: Array, low: Array | None, count: int, num_elements: int) -> Array:
    """Return the positions of the changed elements, ascending."""
    ends = stream != _ESCAPE
    if not ends[-1] or np.count_nonzero(ends) != count:
        raise WeightsError(f"a delta whose gaps are not those of {count} elements")
    total = int(stream.sum(dtype=np.int64))
    if low is not None:
        total = (total << _SPLIT) + int(low.sum(dtype=np.int64))
    if total + count > num_elements:
        raise WeightsError(f"a delta beyond the end of {num_elements} elements")
    passed = np.cumsum(stream, dtype=np.int32)  # cannot overflow: it is at most the total
    if len(passed) > count:
        passed = passed[ends]
    if low is not None:
        passed <<= _SPLIT
        passed += np.cumsum(low, dtype=np.int32)
    passed += np.arange(count, dtype=np.int32)
    return passed


def _differences(signs: Array, planes: list[Array], count: int) -> Array:
    kind = _INTEGERS[len(planes)]
    magnitudes = planes[0].astype(kind)
    for i, plane in enumerate(planes[1:], start=1):
        if plane.any():
            magnitudes |= plane.astype(kind) << kind.type(8 * i)
    magnitudes += kind.type(1)
    negative = np.unpackbits(signs, count=count).astype(kind)
    np.negative(negative, out=negative)  # all bits set where the difference is negative
    magnitudes ^= negative
    magnitudes -= negative
    return magnitudes


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
