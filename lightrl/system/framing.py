"""Records end to end in a file, each with a checksum: how they are framed, and read whatever became
of the file.

    record   u32 length, u32 crc32 of length and payload, payload; little-endian

Owns these bytes. Knows nothing of what a payload means.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO
from zlib import crc32

from lightrl.errors import ProtocolError

_LENGTH = struct.Struct("<I")
HEAD = struct.Struct("<II")  # length, crc32


class TornRecord(ProtocolError):
    """The file ends before its record does."""


def size(payload: bytes) -> int:
    """Bytes of a record on the disk."""
    return HEAD.size + len(payload)


def framed(payloads: Iterable[bytes]) -> Iterator[bytes]:
    """What a file holds of these records, piece by piece."""
    for payload in payloads:
        length = _LENGTH.pack(len(payload))
        yield HEAD.pack(len(payload), crc32(payload, crc32(length)))
        yield payload


def read_payload(file: BinaryIO, left: int, most: int = 1 << 32) -> bytes:
    """Of the record that begins here; `left` bytes are left of the file, and none is longer than
    `most`.

    Raises OSError, TornRecord, and ProtocolError if it is damaged: the file then stands behind it,
    if its length was right.
    """
    head = file.read(HEAD.size)
    length, checksum = HEAD.unpack(head) if len(head) == HEAD.size else (left, 0)
    if length > left - HEAD.size:
        raise TornRecord("a record is cut off")
    if length > most:
        raise ProtocolError("a record is damaged")
    payload = file.read(length)
    if len(payload) < length:  # the file has become shorter meanwhile
        raise TornRecord("a record is cut off")
    if crc32(payload, crc32(head[: _LENGTH.size])) != checksum:
        raise ProtocolError("a record is damaged")
    return payload
