"""The protocol between a puller and a weight server, byte for byte. Has no sockets.

A connection carries requests, one after the other. A request is `REQUEST`, the name of the node
that asks and its ticket; the version is named by its digest. The answer is any number of QUEUED
while others are sent to, then one of

    DATA     and exactly the bytes asked for
    MISSING  this holder has not got them (yet)
    BUSY     and the end of the connection: try again later
    ALL      to ASK_HAVE: the holder has everything
    PART     to ASK_HAVE: a bitmap of the verified buckets, then a RECORD for each change and one
             every SIGN_S; ALL in a record ends the answer

To ASK_HAVE, QUEUED also means that the holder has no such version yet. To any other wrong request
(name, ticket, range) the answer is a closed connection, which shows nothing to strangers.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightrl.errors import ProtocolError
from lightrl.weights.version.layout import num_buckets

# magic, what is asked for, digest, policy_version, offset, size, lengths of name and ticket
REQUEST = struct.Struct("<8sc32sQQQBB")
MAGIC = b"LRPULL4\n"
MAX_NAME_BYTES = 255  # of a node
MAX_TICKET_BYTES = 128

# The manifest's bytes; the file's bytes from `offset` on (twice); which buckets there are of a file
# of `size`. ASK_SHARED is ASK_DATA by a node that relays what it gets to others: all of them are
# faster if they are sent to one after the other.
ASK_MANIFEST, ASK_DATA, ASK_SHARED, ASK_HAVE = b"m", b"d", b"s", b"h"

QUEUED, DATA, BUSY, MISSING, ALL, PART = b"q", b"d", b"b", b"n", b"a", b"p"
SIGN_S = 1.0  # between two QUEUED

# of a change, and to which bucket: QUEUED (none), VERIFIED, GETTING from a complete holder, or ALL
RECORD = struct.Struct("<cI")
VERIFIED, GETTING = b"+", b"g"


@dataclass(frozen=True, slots=True)
class Request:
    """`node` asks for `size` bytes of the version with this digest, from `offset` on."""

    what: bytes
    # 32 bytes
    digest: bytes
    # that of the ticket
    policy_version: int
    offset: int
    size: int
    node: bytes
    ticket: bytes

    def pack(self) -> bytes:
        numbers = (self.policy_version, self.offset, self.size, len(self.node), len(self.ticket))
        return REQUEST.pack(MAGIC, self.what, self.digest, *numbers) + self.node + self.ticket


def num_missing(data: bytes | bytearray) -> int:
    """Return how many bytes must follow `data`, at least, to make it a request; 0 if it is whole.

    Raises ProtocolError if it cannot become one.
    """
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise ProtocolError("not a request for weights")
    if len(data) < REQUEST.size:
        return REQUEST.size - len(data)
    _, what, *_, name_size, ticket_size = REQUEST.unpack_from(data)
    if what not in (ASK_MANIFEST, ASK_DATA, ASK_SHARED, ASK_HAVE):
        raise ProtocolError("a request for what there is not")
    if not name_size or not 0 < ticket_size <= MAX_TICKET_BYTES:
        raise ProtocolError("a request without a name or a ticket")
    return REQUEST.size + name_size + ticket_size - len(data)


def unpack(data: bytes) -> Request:
    """Parse a whole request, see `num_missing`."""
    _, what, digest, version, offset, size, name_size, _ = REQUEST.unpack_from(data)
    names = data[REQUEST.size :]
    return Request(what, digest, version, offset, size, names[:name_size], names[name_size:])


def bitmap_size(size: int) -> int:
    """Bytes of the bitmap of a file of `size` bytes."""
    return -(-num_buckets(size) // 8)


def pack_bitmap(buckets: Iterable[int], size: int) -> bytes:
    """Bucket i is bit i % 8 of byte i // 8."""
    bits = bytearray(bitmap_size(size))
    for i in buckets:
        bits[i // 8] |= 1 << i % 8
    return bytes(bits)


def read_records(data: bytearray) -> Iterator[tuple[bytes, int]]:
    """Remove the whole records from `data` and yield them. Raises ProtocolError."""
    whole = len(data) - len(data) % RECORD.size
    taken = bytes(data[:whole])
    del data[:whole]
    for kind, bucket in RECORD.iter_unpack(taken):
        if kind not in (QUEUED, VERIFIED, GETTING, ALL):
            raise ProtocolError("not a record of what a holder has")
        yield kind, bucket
