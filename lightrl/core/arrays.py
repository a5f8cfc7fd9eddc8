"""Convert tokens and logprobs between arrays, in the core, and little-endian bytes, in messages."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

BIG_ENDIAN = sys.byteorder == "big"


def encode(values: "array[Any]") -> bytes:
    """Return raw little-endian bytes."""
    return native(values.tobytes())


def decode(kind: str, data: bytes) -> "array[Any]":
    """Return the array of raw little-endian bytes of 4-byte items."""
    return array(kind, native(data) if BIG_ENDIAN else data)


def pack_mask(length: int, left_out: Iterable[tuple[int, int]]) -> bytes:
    """Return a loss mask of `length` tokens: a bit for each, the lowest first, 1 = it is trained.
    `left_out`: (start, end) of those that are not."""
    bits = (1 << length) - 1
    for start, end in left_out:
        bits &= ~(((1 << (end - start)) - 1) << start)
    return bits.to_bytes(-(-length // 8), "little")


def native(data: bytes) -> bytes:
    """Swap the bytes of 4-byte items between little-endian and the order of this machine."""
    if not BIG_ENDIAN:
        return data
    values = array("I", data)
    values.byteswap()
    return values.tobytes()
