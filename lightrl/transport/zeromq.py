"""ZeroMQ, and all that must be known of it, for both ends: the coordinator's ROUTER (router.py) and
a node's DEALER (link.py). Owns how their sockets are set up, closed and waited for.

- A default ROUTER drops silently for unknown peers and full pipes: ROUTER_MANDATORY. What is
  outstanding is bounded by the core's credit, but for the answers to what a peer says: who does not
  read them is cut off.
- Without ROUTER_HANDOVER a restarted daemon is ignored while its old connection lives.
- Awaiting every message costs four times as much as waiting once and draining without awaiting.
- ZeroMQ's file descriptor is edge-triggered, and a send may consume the edge: look at EVENTS after
  both.
- A connection that breaks and comes back loses what was in flight, silently: a node must notice it.
- Two daemons of one name would steal each other's connection: an identity is a name and a process.
  Who knew an identity could take its connection over (ROUTER_HANDOVER): its second half is random,
  and as hard to guess as a key.
- All connections are CURVE: the key pairs follow from the keys of the run. A router closes the
  connection of whoever has another one without a word, so all that a link sees is that the
  handshake failed.
- Which key a connection has proved comes with each of its messages, as ZeroMQ's own metadata.
- A connection whose other end has vanished stays open for hours: ZeroMQ's own heartbeats find it,
  but only the nodes send them. A ROUTER that sends its own ends the process (an assertion of libzmq
  4.3.5) when a connection breaks that was taken over by another one of the same identity; it relies
  on TCP's keepalive.
- Whoever connects may make the other side hold one frame before it is known who that is: frames are
  small, and larger messages travel in parts (parts.py). A message of many frames would be held
  whole, whatever its size. Tokens are sent in pieces that mean the same, so that they need no
  assembling.
- A peer that has closed cannot be sent anything while what it said last still lies here unread.
- A process that ends does not wait for ZeroMQ's thread, whatever LINGER says, and on a busy machine
  its last messages are lost: `leave` waits.
"""

import asyncio

import zmq
from zmq.utils import z85

from lightrl.keys import secret_of

MAX_DRAIN = 256  # messages taken before other tasks get their turn,
MAX_DRAIN_BYTES = 1 << 20  # and their size, but for the last one
LINGER_MS = 1000  # what closing may wait for the last messages
SEPARATOR = "/"  # between the two halves of an identity
MAX_TO_ROUTER_BYTES = 64 << 10  # of a frame: so much a stranger may send, before it is known as one
MAX_TO_NODE_BYTES = 1 << 20  # and whoever poses as the coordinator
CURVE_BYTES = 64  # that a frame grows by when it is encrypted, and more
HEARTBEAT_MS = 1000  # on an idle connection
SILENCE_MS = 3000  # a connection without a sign of life is broken; as node.lease_s
HANDSHAKE_MS = 3000
# Asked for with every message: as enums they take twice as long.
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def leave() -> None:
    """The last thing that a process says: returns when what its sockets were to send has left, or
    LINGER_MS have passed. Closes those that are open."""
    zmq.Context.instance().destroy()


def key_pair(key: str) -> tuple[bytes, bytes]:
    """(public, secret), as ZeroMQ writes them, of who connects with this key."""
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
        """Gives the last messages up to LINGER_MS to leave, in the background."""
        self._loop.remove_reader(self._fd)
        self._sock.close()
