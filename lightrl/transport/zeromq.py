"""Create, close and await ZeroMQ sockets: the coordinator's ROUTER (router.py) and a node's DEALER
(link.py). Facts about ZeroMQ that both rely on:

- A default ROUTER drops messages to unknown peers and full pipes silently: ROUTER_MANDATORY. The
  core's credit bounds the outstanding messages, except for answers to a peer's own messages: a peer
  that does not read them is disconnected.
- Without ROUTER_HANDOVER a restarted daemon is ignored while its old connection lives.
- Awaiting every message costs four times as much as waiting once and draining without awaiting.
- ZeroMQ's file descriptor is edge-triggered, and a send may consume the edge: check EVENTS after
  both.
- A connection that breaks and reconnects silently loses messages in flight: a node must notice it.
- Two daemons of one name would take over each other's connection (ROUTER_HANDOVER): an identity is
  a name and a random half, which is as hard to guess as a key.
- All connections use CURVE with key pairs derived from the keys of the run. A router closes a
  connection with another key without a reason, so a link only sees a failed handshake.
- Each message carries the key that its connection has proved, as ZeroMQ's metadata.
- A connection whose other end has vanished stays open for hours. ZeroMQ's heartbeats detect it, but
  only nodes send them: a ROUTER with heartbeats ends the process (an assertion of libzmq 4.3.5)
  when a connection breaks that was taken over by another of the same identity. It relies on TCP
  keepalive.
- An unauthenticated client can make the other side hold one frame: frames are small, and larger
  messages are sent in parts (parts.py), since a message of many frames would be held as a whole.
- A send to a peer that has closed fails even while its last messages are still unread.
- A process that ends does not wait for ZeroMQ's thread, whatever LINGER is, and on a busy machine
  its last messages are lost: `leave` waits.
"""

import asyncio

import zmq
from zmq.utils import z85

from lightrl.keys import secret_of

MAX_DRAIN = 256  # messages received before other tasks run,
MAX_DRAIN_BYTES = 1 << 20  # and their size without the last one
LINGER_MS = 1000  # to send the last messages when a socket is closed
SEPARATOR = "/"  # between the two halves of an identity
MAX_TO_ROUTER_BYTES = 64 << 10  # of a frame, which an unauthenticated client may send
MAX_TO_NODE_BYTES = 1 << 20  # of a frame, which a false coordinator may send
CURVE_BYTES = 64  # at least what encryption adds to a frame
HEARTBEAT_MS = 1000  # on an idle connection
SILENCE_MS = 3000  # after which a connection counts as broken; as node.lease_s
HANDSHAKE_MS = 3000
# Read for every message: enums take twice as long.
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def leave() -> None:
    """Close all sockets, and wait up to LINGER_MS until their messages have been sent."""
    zmq.Context.instance().destroy()


def key_pair(key: str) -> tuple[bytes, bytes]:
    """Return the (public, secret) CURVE keys derived from `key`, in Z85."""
    secret = z85.encode(secret_of(key))
    return zmq.curve_public(secret), secret


class Socket:
    """A ZeroMQ socket of this event loop. Sending never blocks."""

    def __init__(self, kind: int, max_frame_bytes: int) -> None:
        self._sock = zmq.Context.instance().socket(kind)
        self._sock.set(zmq.SNDHWM, 0)
        self._sock.set(zmq.RCVHWM, 0)
        self._sock.set(zmq.MAXMSGSIZE, max_frame_bytes)
        self._sock.set(zmq.LINGER, LINGER_MS)
        self._sock.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._sock.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._sock.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self._sock.set(zmq.HEARTBEAT_TTL, SILENCE_MS)
        self._num_cut = 0  # messages that left in parts
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = self._sock.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._readable.set)

    def _send_frames(self, frames: list[bytes]) -> None:
        self._sock.send_multipart(frames, zmq.DONTWAIT)
        if self._has_input():
            self._readable.set()

    def _has_input(self) -> bool:
        return bool(self._sock.getsockopt(EVENTS) & POLLIN)

    def close(self) -> None:
        """Close; ZeroMQ sends the last messages in the background for up to LINGER_MS."""
        self._loop.remove_reader(self._fd)
        self._sock.close()
