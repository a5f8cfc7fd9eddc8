"""Write and read records with a length and a checksum.

record   u32 length, u32 crc32 of length and payload, payload; little-endian
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
    """Return the bytes of a record on disk."""
    return HEAD.size + len(payload)


def framed(payloads: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of these records, piece by piece."""
    for payload in payloads:
        length = _LENGTH.pack(len(payload))
        yield HEAD.pack(len(payload), crc32(payload, crc32(length)))
        yield payload


def read_payload(file: BinaryIO, left: int, most: int = 1 << 32) -> bytes:
    """Read the next record, given `left` remaining bytes of the file; it has at most `most`.

    Raises OSError, TornRecord, and ProtocolError if the record is damaged; the next call then reads
    the record after it, if its length was right.
    """
    head = file.read(HEAD.size)
    length, checksum = HEAD.unpack(head) if len(head) == HEAD.size else (left, 0)
    if length > left - HEAD.size:
        raise TornRecord("a record is cut off")
    if length > most:
        raise ProtocolError("a record is damaged")
    payload = file.read(length)
    if len(payload) < length:  # the file was truncated meanwhile
        raise TornRecord("a record is cut off")
    if crc32(payload, crc32(head[: _LENGTH.size])) != checksum:
        raise ProtocolError("a record is damaged")
    return payload
