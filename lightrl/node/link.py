"""ZeroMQ, and all that must be known of it: the coordinator's ROUTER and a node's DEALER. Carries
messages; decides nothing.

- A default ROUTER drops silently for unknown peers and full pipes: ROUTER_MANDATORY, no high-water
  mark; what is outstanding is bounded by the core's credit.
- Without ROUTER_HANDOVER a restarted daemon is ignored while its old connection lives.
- Awaiting every message costs four times as much as waiting once and draining without awaiting.
- ZeroMQ's file descriptor is edge-triggered, and a send may consume the edge: look at EVENTS after both.
- A connection that breaks and comes back loses what was in flight, silently: a node must notice it.
- Two daemons of one name would steal each other's connection: an identity is a name and a process.
- All connections are CURVE: both key pairs follow from the key of the run. A hub closes the connection of
  whoever has another one without a word, so all that a link sees is that the handshake failed.
- A connection whose other end has vanished stays open for hours: ZeroMQ's own heartbeats find it.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Self
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from lightrl.errors import ConfigError, PeerUnreachable, ProtocolError, WrongKey
from lightrl.keys import derived
from lightrl.messages import Message, TokenChunk
from lightrl.node.border import require_sane
from lightrl.node.zap import DOORKEEPER
from lightrl.wire import MAX_FRAME_BYTES, MESSAGES

MAX_DRAIN = 256  # messages taken before other tasks get their turn
LINGER_MS = 1000  # what closing may wait for the last messages
WILDCARD = "0.0.0.0"
SEPARATOR = "/"  # between the two halves of an identity
MAX_TO_HUB_BYTES = 32 << 20  # a stranger may announce that much, before it is known as one
HEARTBEAT_MS = 1000  # on an idle connection
SILENCE_MS = 3000  # a connection without a sign of life is broken; as node.lease_s
HANDSHAKE_MS = 10_000
MAX_FAILED_HANDSHAKES = 3  # fewer may be a coordinator that ended at that moment
RECONNECT_MS = 100  # at first, then longer, up to
MAX_RECONNECT_MS = 1000

_UP, _DOWN = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


def _key_pair(key: str, whose: str) -> tuple[bytes, bytes]:
    """(public, secret) as ZeroMQ writes them."""
    secret = z85.encode(derived(key, f"lightrl {whose}"))
    return zmq.curve_public(secret), secret


class _Socket:
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
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = self._sock.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._readable.set)

    async def _receive_frames(self) -> list[list[bytes]]:
        while True:
            self._raise_if_hopeless()
            frames = self._drain()
            if frames:
                if len(frames) == MAX_DRAIN:
                    await asyncio.sleep(0)
                return frames
            self._readable.clear()
            if not self._has_input():
                await self._readable.wait()

    def _raise_if_hopeless(self) -> None:
        """Ends the waiting for input that cannot come."""

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
    """The coordinator's end: many peers, known by name, that all have the key of the run."""

    def __init__(self, address: str, key: str) -> None:
        """Listens on `address` (tcp://host:port, port * = any). Raises ConfigError if it cannot."""
        super().__init__(zmq.ROUTER, MAX_TO_HUB_BYTES)
        self._sock.set(zmq.ROUTER_MANDATORY, 1)
        self._sock.set(zmq.ROUTER_HANDOVER, 1)
        self._sock.set(zmq.CURVE_SERVER, 1)
        self._sock.set(zmq.CURVE_SECRETKEY, _key_pair(key, "coordinator")[1])
        self._domain = f"hub-{secrets.token_hex(4)}"
        self._sock.set_string(zmq.ZAP_DOMAIN, self._domain)
        self._sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        DOORKEEPER.admit(self._domain, z85.decode(_key_pair(key, "node")[0]))
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

    def close(self) -> None:
        DOORKEEPER.forget(self._domain)
        super().close()

    async def receive(self) -> list[tuple[str, Message | ProtocolError]]:
        """Waits for messages; at most MAX_DRAIN of them. A frame that does not decode comes as its error."""
        received: list[tuple[str, Message | ProtocolError]] = []
        for frames in await self._receive_frames():
            peer = frames[0].decode(errors="surrogateescape")
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"message of {len(frames)} frames")
                message = MESSAGES.decode(frames[1])
                require_sane(message)
                received.append((peer, message))
            except ProtocolError as e:
                received.append((peer, e))
        return received


class Link(_Socket):
    """A node's or a tool's end: one connection to the coordinator, which ZeroMQ re-establishes."""

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
        """Connects as a process of node or tool `name`. Raises PeerUnreachable if nothing listens there.

        `on_break` is called when the connection has broken: messages may be lost, in both directions;
        `on_back` when it stands again.
        """
        host, port = host_and_port(address)
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            raise PeerUnreachable(f"{address}: nothing answers there; is the coordinator running?") from None
        writer.close()
        return cls(address, f"{name}{SEPARATOR}{secrets.token_hex(4)}", key, on_break, on_back)

    def __init__(
        self,
        address: str,
        identity: str,
        key: str,
        on_break: Callable[[], None] | None = None,
        on_back: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(zmq.DEALER, MAX_FRAME_BYTES)
        self.is_up = False  # else what is sent waits for the connection
        self._address = address
        self._was_up = False
        self._failed_handshakes = 0  # before the first that worked
        self._on_break, self._on_back = on_break, on_back
        public, secret = _key_pair(key, "node")
        self._sock.set(zmq.CURVE_PUBLICKEY, public)
        self._sock.set(zmq.CURVE_SECRETKEY, secret)
        self._sock.set(zmq.CURVE_SERVERKEY, _key_pair(key, "coordinator")[0])
        self._sock.set(zmq.IDENTITY, identity.encode(errors="surrogateescape"))
        self._sock.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._sock.set(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        monitor: zmq.Socket[bytes] = self._sock.get_monitor_socket(zmq.EVENT_ALL)
        self._monitor: zmq.Socket[bytes] | None = monitor
        self._monitor_fd = monitor.fileno()
        self._loop.add_reader(self._monitor_fd, self._drain_monitor)
        self._sock.connect(address)
        self._drain_monitor()  # only who has found nothing is told when there is something

    def send(self, message: Message) -> None:
        """Never blocks. Tokens that do not fit into one frame leave in several."""
        frame = MESSAGES.encode(message)
        if len(frame) > MAX_TO_HUB_BYTES and isinstance(message, TokenChunk) and len(message.responses) > 1:
            half = len(message.responses) // 2
            self.send(replace(message, responses=message.responses[:half]))
            self.send(replace(message, responses=message.responses[half:]))
        else:
            self._send_frames([frame])

    async def receive(self) -> list[Message]:
        """Waits for messages.

        Raises ProtocolError if the coordinator sends something unreadable, WrongKey if who listens there has
        another key and this link was never up.
        """
        return [MESSAGES.decode(frames[-1]) for frames in await self._receive_frames()]

    def close(self) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor_fd)
            self._sock.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        super().close()

    def _raise_if_hopeless(self) -> None:
        if self._failed_handshakes >= MAX_FAILED_HANDSHAKES:
            raise WrongKey(f"{self._address}: the key is not that of this run")

    def _drain_monitor(self) -> None:
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
            except zmq.Again:
                return
            self._notice(event)

    def _notice(self, event: int) -> None:
        if event == _UP:
            returned, self.is_up, self._was_up = self._was_up, True, True
            if returned and self._on_back is not None:
                self._on_back()
        elif event == zmq.EVENT_DISCONNECTED and self.is_up:
            self.is_up = False
            if self._on_break is not None:
                self._on_break()
        elif event in _FAILED_HANDSHAKES and not self._was_up:
            # Who was up before waits: its run comes back, whoever listens there meanwhile.
            self._failed_handshakes += 1
            self._readable.set()


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
