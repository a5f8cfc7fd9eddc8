"""The coordinator's end of all connections: a ROUTER with many peers.

Tracks the connection of each identity, partial messages, and peers that could not be reached.
unauthenticated.py limits connections without a key.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import zmq
from zmq.utils import z85

from lightrl.errors import ConfigError, PeerUnreachable, ProtocolError
from lightrl.keys import Access, coordinator_secret, environment_key, join_key
from lightrl.messages.message import Message
from lightrl.messages.nodes import Hello, Welcome
from lightrl.system.addresses import host_and_port
from lightrl.transport.parts import Assembly, cut
from lightrl.transport.unauthenticated import UnauthenticatedPeers
from lightrl.transport.validate import check_bounds, require_allowed
from lightrl.transport.zap import AUTHENTICATOR
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

MAX_WHOLE_BYTES = 32 << 20  # of a message to the router that is sent in parts
MAX_PARTIAL_BYTES = 256 << 20  # of all messages with missing parts
MAX_WAITING = 1 << 14  # queued messages of one peer; no message has as many parts
MAX_WELCOMES = 8  # for one connection: each holds the small files of the model
# batches after which a lost peer counts as drained
MAX_UNDRAINED = 16
ACCESS = {access.value: access for access in Access}  # quicker than the enum, for each message
BACKLOG = 1024  # connections that the kernel holds until ZeroMQ accepts them


class Peer(NamedTuple):
    """The sender of a message: its identity, which it chose, and the access of its key."""

    identity: str
    access: Access

    @property
    def name(self) -> str:
        """The name of the node or tool, as claimed."""
        return self.identity.rpartition(SEPARATOR)[0] or self.identity


Received: TypeAlias = tuple[Peer, Message | ProtocolError | PeerUnreachable]


class Router(Socket):
    """Connections to many peers, each of which has one of the run's keys."""

    def __init__(self, address: str, key: str) -> None:
        """Listen on `address` (tcp://host:port; port * = any) with the full key of the run.

        Raises ConfigError if the address cannot be bound.
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
        keys = {
            Access.FULL: key,
            Access.JOIN: join_key(key),
            Access.ENVIRONMENT: environment_key(key),
        }
        AUTHENTICATOR.admit(
            self._domain, {z85.decode(key_pair(k)[0]): a.value for a, k in keys.items()}
        )
        self._unauthenticated = UnauthenticatedPeers(self._sock, self._domain, self._readable.set)
        # by identity: connection and received parts
        self._partial: dict[bytes, tuple[int, Assembly]] = {}
        self._partial_bytes = 0  # of all of them
        self._connections: dict[bytes, int] = {}  # identity -> connection of its last message
        self._welcomes: Counter[int] = Counter()  # connection -> welcomes sent
        # unreachable peers, and the batches received since
        self._unreachable: dict[Peer, int] = {}
        try:
            self._sock.bind(address)
            self.address = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
            self._unauthenticated.listens_on(host_and_port(self.address)[1])
        except (zmq.ZMQError, OSError) as e:
            self.close()
            raise ConfigError(f"run.bind = {address}: cannot listen there: {e}") from None

    def num_connections(self) -> tuple[int, int]:
        """Return the numbers of authenticated and of unauthenticated connections."""
        return self._unauthenticated.count()

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message. Raises PeerUnreachable if the peer is not connected.

        Messages that the peer sent before may still be received. A peer that does not read, or
        asks for too many welcomes, is disconnected; an honest one reconnects and sends Hello.
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
                self._unauthenticated.end(self._connections[identity])
            raise PeerUnreachable(peer.identity) from None

    def _may_welcome(self, identity: bytes) -> bool:
        connection = self._connections.get(identity)
        if connection is None:  # no message yet, or disconnected
            return True
        self._welcomes[connection] += 1
        if self._welcomes[connection] == MAX_WELCOMES + 1:
            self._unauthenticated.end(connection)
        return self._welcomes[connection] <= MAX_WELCOMES

    def drain(self, peer: Peer) -> None:
        """Let `receive` report PeerUnreachable after the last message received from `peer`.

        A Hello among those messages cancels the report: the peer is connected again.
        """
        self._unreachable.setdefault(peer, 0)
        self._readable.set()

    def close(self) -> None:
        if not self._sock.closed:
            AUTHENTICATOR.forget(self._domain)
            self._unauthenticated.close()
            super().close()

    async def receive(self) -> list[Received]:
        """Wait for messages, and return at most MAX_DRAIN; possibly none, if only parts arrived.

        A frame that cannot be decoded, or that its key does not permit, is returned as its error.
        """
        while True:
            unreachable, gone = list(self._unreachable), set(self._unauthenticated.gone)
            messages = self._receive_all()
            received = [entry for each in messages if (entry := self._decoded(*each)) is not None]
            is_drained = not self._has_input()
            if is_drained:
                self._forget(gone)
            received += self._lost(unreachable, is_drained)
            if received or not is_drained:
                await asyncio.sleep(0)  # other tasks run even if messages never cease
                if not received and not messages:
                    continue  # input arrived after the drain
                return received
            self._readable.clear()
            if not (self._has_input() or self._unreachable or self._unauthenticated.gone):
                await self._readable.wait()

    def _lost(self, unreachable: list[Peer], is_drained: bool) -> Iterator[Received]:
        """Yield the unreachable peers whose messages have all been received."""
        for peer in unreachable:
            if peer in self._unreachable:
                self._unreachable[peer] += 1
                if is_drained or self._unreachable[peer] >= MAX_UNDRAINED:
                    del self._unreachable[peer]
                    yield peer, PeerUnreachable(peer.identity)

    def _receive_all(self) -> list[tuple[int, Access, list[bytes]]]:
        """Return (connection, access of its key, frames) of messages that have arrived."""
        messages: list[tuple[int, Access, list[bytes]]] = []
        num_bytes = 0
        # Asking is cheaper than the exception that ends nearly every batch.
        while len(messages) < MAX_DRAIN and num_bytes < MAX_DRAIN_BYTES and self._has_input():
            first = self._sock.recv(zmq.DONTWAIT, copy=False)
            connection = self._unauthenticated.mark_authenticated(int(first.get(zmq.SRCFD)))
            access = ACCESS[str(first.get("User-Id"))]
            frames = self._sock.recv_multipart(zmq.DONTWAIT)
            num_bytes += sum(map(len, frames))
            identity = first.bytes
            self._connections[identity] = connection
            messages.append((connection, access, [identity, *frames]))
        return messages

    def _decoded(self, connection: int, access: Access, frames: list[bytes]) -> Received | None:
        """Decode and check a message; None if its last part has not arrived."""
        peer = Peer(frames[0].decode(errors="surrogateescape"), access)
        try:
            frame = self._whole(connection, *frames)
            if frame is None:
                return None
            message = MESSAGES.decode(frame)
            check_bounds(message)
            require_allowed(peer.name, message, access)
        except ProtocolError as e:
            self._drop_parts(frames[0])
            return peer, e
        if isinstance(message, Hello):
            self._unreachable.pop(peer, None)
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
        """Drop the state of connections that have ended, partial messages included."""
        if not gone:
            return
        self._unauthenticated.gone -= gone
        self._connections = {i: c for i, c in self._connections.items() if c not in gone}
        for connection in gone:
            self._welcomes.pop(connection, None)
        for identity in [i for i, (connection, _) in self._partial.items() if connection in gone]:
            self._drop_parts(identity)
