"""The end of a node or a tool: a DEALER with one connection to the coordinator.

Tracks whether the connection is up, and whether failed handshakes mean a wrong key.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from lightrl.errors import PeerUnreachable, WrongKey
from lightrl.keys import coordinator_public_key
from lightrl.messages.message import Message
from lightrl.messages.responses import TokenChunk
from lightrl.system.addresses import WILDCARD, host_and_port
from lightrl.system.timeouts import patient_timeout
from lightrl.transport.parts import Assembly, cut, in_pieces
from lightrl.transport.unauthenticated import PATIENCE_S
from lightrl.transport.zeromq import (
    CURVE_BYTES,
    MAX_DRAIN,
    MAX_DRAIN_BYTES,
    MAX_TO_NODE_BYTES,
    MAX_TO_ROUTER_BYTES,
    SEPARATOR,
    Socket,
    key_pair,
)
from lightrl.wire import MAX_FRAME_BYTES, MESSAGES

RANDOM_BYTES = 16  # in the second half of an identity
MAX_DOUBT = 12  # of the key, before the first handshake that succeeds
# for a handshake that was refused immediately; also happens when a coordinator is ending
SOON_DOUBT = 4
# for one that was closed later: most likely by the limit on unauthenticated connections
LATE_DOUBT = 1
RECONNECT_MS = 100  # at first, then longer, up to
MAX_RECONNECT_MS = 1000

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class Link(Socket):
    """One connection to the coordinator, which ZeroMQ re-establishes."""

    @classmethod
    async def connect(
        cls,
        address: str,
        name: str,
        key: str,
        timeout_s: float = 3.0,
        on_break: Callable[[], None] | None = None,
        on_back: Callable[[], None] | None = None,
    ) -> Self:
        """Connect as a process of node or tool `name`. Raises PeerUnreachable if nothing listens.

        `on_break` is called when the connection has broken: messages may be lost in both
        directions. `on_back` is called when it is up again.
        """
        host, port = host_and_port(address)
        try:
            async with patient_timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            raise PeerUnreachable(f"{address}: no answer; is the coordinator running?") from None
        writer.close()
        identity = f"{name}{SEPARATOR}{secrets.token_hex(RANDOM_BYTES)}"
        try:
            return cls(address, identity, key, on_break, on_back)
        except zmq.ZMQError as e:  # no descriptor is free
            raise PeerUnreachable(f"{address}: {e}") from None

    def __init__(
        self,
        address: str,
        identity: str,
        key: str,
        on_break: Callable[[], None] | None = None,
        on_back: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(zmq.DEALER, MAX_TO_NODE_BYTES)
        self._partial = Assembly(MAX_FRAME_BYTES)
        self.is_up = False  # while False, sent messages wait for the connection
        self._address = address
        self._was_up = False
        self._doubt = 0  # whether the key is that of the run
        self._connected_at = 0.0
        self._on_break, self._on_back = on_break, on_back
        public, secret = key_pair(key)
        self._sock.set(zmq.CURVE_PUBLICKEY, public)
        self._sock.set(zmq.CURVE_SECRETKEY, secret)
        self._sock.set(zmq.CURVE_SERVERKEY, z85.encode(coordinator_public_key(key)))
        self._sock.set(zmq.IDENTITY, identity.encode(errors="surrogateescape"))
        self._sock.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._sock.set(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        monitor: zmq.Socket[bytes] = self._sock.get_monitor_socket(zmq.EVENT_ALL)
        self._monitor: zmq.Socket[bytes] | None = monitor
        self._monitor_fd = monitor.fileno()
        self._loop.add_reader(self._monitor_fd, self._drain_monitor)
        self._sock.connect(address)
        self._drain_monitor()  # the descriptor is edge-triggered

    def send(self, message: Message) -> None:
        """Send without blocking. A message larger than a frame is sent in parts."""
        frame, most = MESSAGES.encode(message), MAX_TO_ROUTER_BYTES - CURVE_BYTES
        if len(frame) <= most:
            self._send_frames([frame])
        elif isinstance(message, TokenChunk):
            for piece in in_pieces(message, most):
                self._send_frames([MESSAGES.encode(piece)])
        else:
            self._num_cut += 1
            for part in cut(frame, self._num_cut, most):
                self._send_frames(part)

    async def receive(self) -> list[Message]:
        """Wait for messages.

        Raises ProtocolError if a message cannot be decoded, WrongKey if the coordinator has another
        key and this link was never up.
        """
        messages: list[Message] = []
        while not messages:
            for frames in await self._receive_frames():
                frame = self._partial.add(*frames) if len(frames) == 2 else frames[-1]
                if frame is not None:
                    messages.append(MESSAGES.decode(frame))
        return messages

    def close(self) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor_fd)
            self._sock.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        super().close()

    async def _receive_frames(self) -> list[list[bytes]]:
        while True:
            if self._doubt >= MAX_DOUBT:
                raise WrongKey(f"{self._address}: the key is not that of this run")
            frames = self._drain()
            if frames:
                await asyncio.sleep(0)  # other tasks run even if messages never cease
                return frames
            self._readable.clear()
            if not self._has_input():
                await self._readable.wait()

    def _drain(self) -> list[list[bytes]]:
        frames: list[list[bytes]] = []
        num_bytes = 0
        while len(frames) < MAX_DRAIN and num_bytes < MAX_DRAIN_BYTES:
            try:
                frames.append(self._sock.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            num_bytes += len(frames[-1][-1])
        return frames

    def _drain_monitor(self) -> None:
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
            except zmq.Again:
                return
            self._notice(event)

    def _notice(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected_at = self._loop.time()
        elif event == _UP:
            returned, self.is_up, self._was_up = self._was_up, True, True
            if returned and self._on_back is not None:
                self._on_back()
        elif event == zmq.EVENT_DISCONNECTED and self.is_up:
            self.is_up = False
            if self._on_break is not None:
                self._on_break()
        elif event in _FAILED_HANDSHAKES and not self._was_up:
            # A link that was up before waits until its run listens there again.
            is_late = self._loop.time() - self._connected_at >= PATIENCE_S
            self._doubt += LATE_DOUBT if is_late else SOON_DOUBT
            self._readable.set()


def own_address(towards: str) -> str:
    """Return the local address used to reach `towards` (tcp://host:port); sends nothing.

    0.0.0.0 is returned as it is: a coordinator on this machine listens on all interfaces.
    """
    host, port = host_and_port(towards)
    if host == WILDCARD:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
