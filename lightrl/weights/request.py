"""What a puller and a weight server say to each other, byte for byte. Knows nothing of sockets.

A connection carries any number of requests, one after the other. A request is `REQUEST`, the name
of the node that asks and its ticket. The answer is any number of QUEUED while others are sent to,
then DATA and exactly the bytes asked for; or BUSY and the end of the connection: come again.
Whatever is wrong with a request (name, ticket, version, range), the answer is a closed connection,
so that a stranger learns nothing.
"""

import struct
from dataclasses import dataclass

from lightrl.errors import ProtocolError

# magic, policy_version, offset, size, lengths of name and ticket
REQUEST = struct.Struct("<8sQQQBB")
MAGIC = b"LRPULL3\n"
MAX_NAME_BYTES = 255  # of a node
MAX_TICKET_BYTES = 128

QUEUED, DATA, BUSY = b"q", b"d", b"b"
SIGN_S = 1.0  # QUEUED is said so often


@dataclass(frozen=True, slots=True)
class Request:
    """`size` bytes of a version's file from `offset` on, for `node`."""

    policy_version: int
    offset: int
    size: int
    node: bytes
    ticket: bytes

    def pack(self) -> bytes:
        numbers = (self.policy_version, self.offset, self.size, len(self.node), len(self.ticket))
        return REQUEST.pack(MAGIC, *numbers) + self.node + self.ticket


def num_missing(data: bytes | bytearray) -> int:
    """How many bytes must follow `data`, at least, to make it a request; 0 when it is whole.

    Raises ProtocolError if it cannot become one.
    """
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise ProtocolError("not a request for weights")
    if len(data) < REQUEST.size:
        return REQUEST.size - len(data)
    *_, name_size, ticket_size = REQUEST.unpack_from(data)
    if not name_size or not 0 < ticket_size <= MAX_TICKET_BYTES:
        raise ProtocolError("a request without a name or a ticket")
    return REQUEST.size + name_size + ticket_size - len(data)


def unpack(data: bytes) -> Request:
    """Of a whole request, see `num_missing`."""
    _, version, offset, size, name_size, _ = REQUEST.unpack_from(data)
    names = data[REQUEST.size :]
    return Request(version, offset, size, names[:name_size], names[name_size:])
