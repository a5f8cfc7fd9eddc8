"""The coordinator's end of all connections: a ROUTER with many peers. Carries messages, decides
nothing.

Owns who is connected under which identity, messages that come in parts, and who could not be
reached. How many may connect without a key is in strangers.py.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import zmq
from zmq.utils import z85

from lightrl.errors import ConfigError, PeerUnreachable, ProtocolError
from lightrl.keys import Access, coordinator_secret, join_key
from lightrl.messages.message import Message
from lightrl.messages.nodes import Hello, Welcome
from lightrl.system.addresses import host_and_port
from lightrl.transport.parts import Assembly, cut
from lightrl.transport.strangers import Strangers
from lightrl.transport.validate import check_bounds, require_allowed
from lightrl.transport.zap import DOORKEEPER
from lightrl.transport.zeromq import (
    CURVE_BYTES,
    MAX_DRAIN,
    MAX_DRAIN_BYTES,
    MAX_TO_NODE_BYTES,
    MAX_TO_ROUTER_BYTES,
    SEPARATOR,
    SILENCE_MS,
    Socket,
    key_pair,
)
from lightrl.wire import MESSAGES

MAX_WHOLE_BYTES = 32 << 20  # of a message to the router that comes in parts
MAX_PARTIAL_BYTES = 256 << 20  # of all of them of which parts are still to come
MAX_WAITING = 1 << 14  # messages for a peer that it does not read: no order is cut into as many
MAX_WELCOMES = 8  # through one connection: each has the small files of the model in it
# batches after which a peer counts as heard, however much is left: its share was read
MAX_UNDRAINED = 16
ACCESS = {access.value: access for access in Access}  # quicker than the enum, for each message
BACKLOG = 1024  # connections that the kernel holds until ZeroMQ accepts them


class Peer(NamedTuple):
    """Who has sent a message: what it calls itself, and what its connection has proved to be
    allowed."""

    identity: str
    access: Access

    @property
    def name(self) -> str:
        """Of the node or tool, by its own word."""
        return self.identity.rpartition(SEPARATOR)[0] or self.identity


Received: TypeAlias = tuple[Peer, Message | ProtocolError | PeerUnreachable]


class Router(Socket):
    """The coordinator's end: many peers, that all have one of the run's two keys."""

    def __init__(self, address: str, key: str) -> None:
        """Listens on `address` (tcp://host:port, port * = any); `key` is the full key of the run.

        Raises ConfigError if it cannot.
        """
        secret = coordinator_secret(key)
        super().__init__(zmq.ROUTER, MAX_TO_ROUTER_BYTES)
        self._sock.set(zmq.SNDHWM, MAX_WAITING)
        self._sock.set(zmq.BACKLOG, BACKLOG)
        self._sock.set(zmq.HEARTBEAT_IVL, 0)
        self._sock.set(zmq.TCP_KEEPALIVE, 1)
        self._sock.set(zmq.TCP_KEEPALIVE_IDLE, SILENCE_MS // 1000)
        self._sock.set(zmq.TCP_KEEPALIVE_INTVL, 1)
        self._sock.set(zmq.TCP_KEEPALIVE_CNT, 3)
        self._sock.set(zmq.TCP_MAXRT, SILENCE_MS)
        self._sock.set(zmq.ROUTER_MANDATORY, 1)
        self._sock.set(zmq.ROUTER_HANDOVER, 1)
        self._sock.set(zmq.CURVE_SERVER, 1)
        self._sock.set(zmq.CURVE_SECRETKEY, z85.encode(secret))
        self._domain = f"router-{secrets.token_hex(4)}"
        self._sock.set_string(zmq.ZAP_DOMAIN, self._domain)
        self._sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        keys = {Access.FULL: key, Access.JOIN: join_key(key)}
        DOORKEEPER.admit(
            self._domain, {z85.decode(key_pair(k)[0]): a.value for a, k in keys.items()}
        )
        self._strangers = Strangers(self._sock, self._domain, self._readable.set)
        # by identity: the connection that the parts come through, and what has come
        self._partial: dict[bytes, tuple[int, Assembly]] = {}
        self._partial_bytes = 0  # of all of them
        self._connections: dict[bytes, int] = {}  # through which an identity has spoken last
        self._welcomes: Counter[int] = Counter()  # through a connection
        # who cannot be reached, and batches since that was known
        self._unheard: dict[Peer, int] = {}
        try:
            self._sock.bind(address)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(f"run.bind = {address}: cannot listen there: {e}") from None
        self.address = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self._strangers.listens_on(host_and_port(self.address)[1])

    def num_connections(self) -> tuple[int, int]:
        """Of those who have said something, which takes a key; and of those who have not."""
        return self._strangers.count()

    def send(self, peer: Peer, message: Message) -> None:
        """Raises PeerUnreachable if no such peer is connected; messages of it may still be
        received.

        Also if it does not read, or is welcomed again and again: its connection then ends. An
        honest peer comes back and says hello anew.
        """
        identity = peer.identity.encode(errors="surrogateescape")
        if isinstance(message, Welcome) and not message.refused and not self._may_welcome(identity):
            raise PeerUnreachable(peer.identity)
        frame, most = MESSAGES.encode(message), MAX_TO_NODE_BYTES - CURVE_BYTES
        try:
            if len(frame) <= most:
                self._send_frames([identity, frame])
                return
            self._num_cut += 1
            for part in cut(frame, self._num_cut, most):
                self._send_frames([identity, *part])
        except zmq.ZMQError as e:
            if e.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            if e.errno == zmq.EAGAIN and identity in self._connections:
                self._strangers.end(self._connections[identity])
            raise PeerUnreachable(peer.identity) from None

    def _may_welcome(self, identity: bytes) -> bool:
        connection = self._connections.get(identity)
        if connection is None:  # nobody has spoken, or it has gone
            return True
        self._welcomes[connection] += 1
        if self._welcomes[connection] == MAX_WELCOMES + 1:
            self._strangers.end(connection)
        return self._welcomes[connection] <= MAX_WELCOMES

    def hear_out(self, peer: Peer) -> None:
        """This peer could not be reached: `receive` says so, too, once all that lies here of it was
        received.

        Not if a hello is among it: then the peer is there again.
        """
        self._unheard.setdefault(peer, 0)
        self._readable.set()

    def close(self) -> None:
        if not self._sock.closed:
            DOORKEEPER.forget(self._domain)
            self._strangers.close()
            super().close()

    async def receive(self) -> list[Received]:
        """Waits for messages; at most MAX_DRAIN of them, which may be none if only parts came. A
        frame that does not decode, or says what its connection's key is not good for, comes as its
        error."""
        while True:
            unheard, gone = list(self._unheard), set(self._strangers.gone)
            messages = self._receive_all()
            received = [entry for each in messages if (entry := self._decoded(*each)) is not None]
            is_drained = not self._has_input()
            if is_drained:
                self._forget(gone)
            received += self._lost(unheard, is_drained)
            if received or not is_drained:
                await asyncio.sleep(0)  # also if this was all: more comes while it is dealt with
                if not received and not messages:
                    continue  # it came after nothing was found
                return received
            self._readable.clear()
            if not (self._has_input() or self._unheard or self._strangers.gone):
                await self._readable.wait()

    def _lost(self, unheard: list[Peer], is_drained: bool) -> Iterator[Received]:
        """Those of whom nothing lies here any more that they said before they could not be
        reached."""
        for peer in unheard:
            if peer in self._unheard:
                self._unheard[peer] += 1
                if is_drained or self._unheard[peer] >= MAX_UNDRAINED:
                    del self._unheard[peer]
                    yield peer, PeerUnreachable(peer.identity)

    def _receive_all(self) -> list[tuple[int, Access, list[bytes]]]:
        """Messages that have arrived: through which connection, what that has proved, and their
        frames."""
        messages: list[tuple[int, Access, list[bytes]]] = []
        num_bytes = 0
        # Asking is cheaper than the exception that ends nearly every batch.
        while len(messages) < MAX_DRAIN and num_bytes < MAX_DRAIN_BYTES and self._has_input():
            first = self._sock.recv(zmq.DONTWAIT, copy=False)
            connection = self._strangers.spoke(int(first.get(zmq.SRCFD)))
            access = ACCESS[str(first.get("User-Id"))]
            frames = self._sock.recv_multipart(zmq.DONTWAIT)
            num_bytes += sum(map(len, frames))
            identity = first.bytes
            self._connections[identity] = connection
            messages.append((connection, access, [identity, *frames]))
        return messages

    def _decoded(self, connection: int, access: Access, frames: list[bytes]) -> Received | None:
        """None for a part of a message that is not the last."""
        peer = Peer(frames[0].decode(errors="surrogateescape"), access)
        try:
            frame = self._whole(connection, *frames)
            if frame is None:
                return None
            message = MESSAGES.decode(frame)
            check_bounds(message)
            if access is not Access.FULL:
                require_allowed(peer.name, message)
        except ProtocolError as e:
            self._drop_parts(frames[0])
            return peer, e
        if isinstance(message, Hello):
            self._unheard.pop(peer, None)
        return peer, message

    def _whole(self, connection: int, identity: bytes, *frames: bytes) -> bytes | None:
        if len(frames) == 1:
            return frames[0]
        if len(frames) != 2:
            raise ProtocolError(f"message of {len(frames)} frames")
        _, assembly = self._partial.get(identity) or (0, Assembly(MAX_WHOLE_BYTES))
        self._partial[identity] = connection, assembly
        before = assembly.num_bytes
        frame = assembly.add(*frames)
        self._partial_bytes += assembly.num_bytes - before
        if frame is not None:
            del self._partial[identity]
        elif self._partial_bytes > MAX_PARTIAL_BYTES:
            raise ProtocolError("too many messages in parts")
        return frame

    def _drop_parts(self, identity: bytes) -> None:
        _, assembly = self._partial.pop(identity, (0, None))
        if assembly is not None:
            self._partial_bytes -= assembly.num_bytes

    def _forget(self, gone: set[int]) -> None:
        """Peers whose connection has ended; the rest of what they said in parts will never come."""
        if not gone:
            return
        self._strangers.gone -= gone
        self._connections = {i: c for i, c in self._connections.items() if c not in gone}
        for connection in gone:
            self._welcomes.pop(connection, None)
        for identity in [i for i, (connection, _) in self._partial.items() if connection in gone]:
            self._drop_parts(identity)
