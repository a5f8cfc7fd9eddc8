"""ZeroMQ, and all that must be known of it: the coordinator's ROUTER and a node's DEALER. Carries
messages; decides nothing.

- A default ROUTER drops silently for unknown peers and full pipes: ROUTER_MANDATORY, no high-water
  mark; what is outstanding is bounded by the core's credit.
- Without ROUTER_HANDOVER a restarted daemon is ignored while its old connection lives.
- Awaiting every message costs four times as much as waiting once and draining without awaiting.
- ZeroMQ's file descriptor is edge-triggered, and a send may consume the edge: look at EVENTS after both.
- A connection that breaks and comes back loses what was in flight, silently: a node must notice it.
- Two daemons of one name would steal each other's connection: an identity is a name and a process.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit

import zmq

from lightrl.errors import ConfigError, PeerUnreachable, ProtocolError
from lightrl.messages import Message
from lightrl.wire import MAX_FRAME_BYTES, MESSAGES

MAX_DRAIN = 256  # messages taken before other tasks get their turn
LINGER_MS = 1000  # what closing may wait for the last messages
WILDCARD = "0.0.0.0"
SEPARATOR = "/"  # between the two halves of an identity


class _Socket:
    """A ZeroMQ socket of this event loop. Sending never blocks."""

    def __init__(self, kind: int) -> None:
        self._sock = zmq.Context.instance().socket(kind)
        self._sock.set(zmq.SNDHWM, 0)
        self._sock.set(zmq.RCVHWM, 0)
        self._sock.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._sock.set(zmq.LINGER, LINGER_MS)
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = self._sock.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._readable.set)

    async def _receive_frames(self) -> list[list[bytes]]:
        while True:
            frames = self._drain()
            if frames:
                if len(frames) == MAX_DRAIN:
                    await asyncio.sleep(0)
                return frames
            self._readable.clear()
            if not self._has_input():
                await self._readable.wait()

    def _drain(self) -> list[list[bytes]]:
        frames: list[list[bytes]] = []
        while len(frames) < MAX_DRAIN:
            try:
                frames.append(self._sock.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
        return frames

    def _send_frames(self, frames: list[bytes]) -> None:
        self._sock.send_multipart(frames, zmq.DONTWAIT)
        if self._has_input():
            self._readable.set()

    def _has_input(self) -> bool:
        return bool(self._sock.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def close(self) -> None:
        """Gives the last messages up to LINGER_MS to leave, in the background."""
        self._loop.remove_reader(self._fd)
        self._sock.close()


class Hub(_Socket):
    """The coordinator's end: many peers, known by name."""

    def __init__(self, address: str) -> None:
        """Listens on `address` (tcp://host:port, port * = any). Raises ConfigError if it cannot."""
        super().__init__(zmq.ROUTER)
        self._sock.set(zmq.ROUTER_MANDATORY, 1)
        self._sock.set(zmq.ROUTER_HANDOVER, 1)
        try:
            self._sock.bind(address)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(f"run.bind = {address}: cannot listen there: {e}") from None
        self.address = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: str, message: Message) -> None:
        """Raises PeerUnreachable if no such peer is connected."""
        try:
            self._send_frames([peer.encode(errors="surrogateescape"), MESSAGES.encode(message)])
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                raise PeerUnreachable(peer) from None
            raise

    async def receive(self) -> list[tuple[str, Message | ProtocolError]]:
        """Waits for messages; at most MAX_DRAIN of them. A frame that does not decode comes as its error."""
        received: list[tuple[str, Message | ProtocolError]] = []
        for frames in await self._receive_frames():
            peer = frames[0].decode(errors="surrogateescape")
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"message of {len(frames)} frames")
                received.append((peer, MESSAGES.decode(frames[1])))
            except ProtocolError as e:
                received.append((peer, e))
        return received


class Link(_Socket):
    """A node's or a tool's end: one connection to the coordinator, which ZeroMQ re-establishes."""

    @classmethod
    async def connect(
        cls, address: str, name: str, timeout_s: float = 3.0, on_break: Callable[[], None] | None = None
    ) -> Self:
        """Connects as a process of node or tool `name`. Raises PeerUnreachable if nothing listens there.

        `on_break` is called when the connection has broken: messages may be lost, in both directions.
        """
        host, port = host_and_port(address)
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            raise PeerUnreachable(f"{address}: nothing answers there; is the coordinator running?") from None
        writer.close()
        return cls(address, f"{name}{SEPARATOR}{secrets.token_hex(4)}", on_break)

    def __init__(self, address: str, identity: str, on_break: Callable[[], None] | None) -> None:
        super().__init__(zmq.DEALER)
        self._sock.set(zmq.IDENTITY, identity.encode())
        self._monitor: zmq.Socket[bytes] | None = None
        if on_break is not None:
            monitor = self._monitor = self._sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._loop.add_reader(monitor.fileno(), self._drain_monitor, on_break)
        self._sock.connect(address)

    def send(self, message: Message) -> None:
        self._send_frames([MESSAGES.encode(message)])

    async def receive(self) -> list[Message]:
        """Waits for messages. Raises ProtocolError if the coordinator sends something unreadable."""
        return [MESSAGES.decode(frames[-1]) for frames in await self._receive_frames()]

    def close(self) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._sock.disable_monitor()
            self._monitor = None
        super().close()

    def _drain_monitor(self, on_break: Callable[[], None]) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            self._monitor.recv_multipart(zmq.DONTWAIT)
            on_break()


def host_and_port(address: str) -> tuple[str, int]:
    """Of tcp://host:port. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not address.startswith("tcp://") or not host or not port:
        raise ConfigError(f"{address!r}: an address looks like tcp://host:5600")
    return host, port


def own_address(towards: str) -> str:
    """The address of this machine that `towards` (tcp://host:port) sees; nothing is sent.

    0.0.0.0 stays what it is: a coordinator that listens everywhere, on this machine.
    """
    host, port = host_and_port(towards)
    if host == WILDCARD:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
