"""Tokens and logprobs: arrays where the core keeps them, raw little-endian bytes on the way."""

import sys
from array import array
from typing import Any

BIG_ENDIAN = sys.byteorder == "big"


def encode(values: "array[Any]") -> bytes:
    """As raw little-endian bytes."""
    return native(values.tobytes())


def decode(kind: str, data: bytes) -> "array[Any]":
    """From raw little-endian bytes of 4-byte items."""
    return array(kind, native(data) if BIG_ENDIAN else data)


def native(data: bytes) -> bytes:
    """Swaps the bytes of 4-byte items between little-endian and what this machine has."""
    if not BIG_ENDIAN:
        return data
    values = array("I", data)
    values.byteswap()
    return values.tobytes()
