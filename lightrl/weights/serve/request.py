"""The protocol between a puller and a weight server, byte for byte. Has no sockets.

A connection carries requests, one after the other. A request is `REQUEST`, the name of the node
that asks and its ticket; the version is named by its digest. The answer is any number of QUEUED
while others are sent to, then one of

    DATA     and exactly the bytes asked for
    MISSING  this holder does not have them (yet)
    BUSY     and the end of the connection: try again later
    ALL      to ASK_HAVE: the holder has everything
    PART     to ASK_HAVE: a `Holdings`

ASK_HAVE is a long poll: its `offset` is the number of changes that the puller has seen, and the
answer comes when the holder has another number, or after SIGN_S. QUEUED then also means that the
holder has no such version yet. A wrong request (name, ticket, range) closes the connection, which
shows nothing to strangers.
"""

import struct
from dataclasses import dataclass

from lightrl.errors import ProtocolError
from lightrl.weights.version.layout import num_buckets

# magic, what is asked for, digest, policy_version, offset, size, lengths of name and ticket
REQUEST = struct.Struct("<8sc32sQQQBB")
MAGIC = b"LRPULL5\n"
MAX_NAME_BYTES = 255  # of a node
MAX_TICKET_BYTES = 128

# The manifest's bytes; the file's bytes from `offset` on (twice); which buckets there are of a file
# of `size`. ASK_SHARED is ASK_DATA by a node that relays what it gets to others: all of them are
# faster if they are sent to one after the other.
ASK_MANIFEST, ASK_DATA, ASK_SHARED, ASK_HAVE = b"m", b"d", b"s", b"h"

QUEUED, DATA, BUSY, MISSING, ALL, PART = b"q", b"d", b"b", b"n", b"a", b"p"
ANSWERS = frozenset({DATA, BUSY, MISSING, ALL, PART})
SIGN_S = 1.0  # between two QUEUED
_CHANGES = struct.Struct("<Q")


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


@dataclass(frozen=True, slots=True)
class Holdings:
    """Which buckets an incomplete holder has: bit i of an int is bucket i."""

    # how often this has changed
    changes: int
    verified: int
    # on their way from a complete holder
    getting: int

    def pack(self, size: int) -> bytes:
        """Encode the holdings of a file of `size` bytes."""
        length = -(-num_buckets(size) // 8)
        masks = (self.verified.to_bytes(length, "little"), self.getting.to_bytes(length, "little"))
        return _CHANGES.pack(self.changes) + b"".join(masks)


def holdings_size(size: int) -> int:
    """Return the bytes of packed `Holdings` of a file of `size` bytes."""
    return _CHANGES.size + 2 * -(-num_buckets(size) // 8)


def unpack_holdings(data: bytes, size: int) -> Holdings:
    """Raises ProtocolError for buckets that do not exist."""
    (changes,) = _CHANGES.unpack_from(data)
    middle = (len(data) + _CHANGES.size) // 2
    verified = int.from_bytes(data[_CHANGES.size : middle], "little")
    getting = int.from_bytes(data[middle:], "little")
    if (verified | getting) >> num_buckets(size):
        raise ProtocolError("has a bucket that does not exist")
    return Holdings(changes, verified, getting)


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
        raise ProtocolError("a request of an unknown kind")
    if not name_size or not 0 < ticket_size <= MAX_TICKET_BYTES:
        raise ProtocolError("a request without a name or a ticket")
    return REQUEST.size + name_size + ticket_size - len(data)


def unpack(data: bytes) -> Request:
    """Parse a whole request, see `num_missing`."""
    _, what, digest, version, offset, size, name_size, _ = REQUEST.unpack_from(data)
    names = data[REQUEST.size :]
    return Request(what, digest, version, offset, size, names[:name_size], names[name_size:])
