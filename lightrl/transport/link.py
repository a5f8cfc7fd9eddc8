"""ZeroMQ, and all that must be known of it: the coordinator's ROUTER and a node's DEALER. Carries
messages; decides nothing.

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
- All connections are CURVE: the key pairs follow from the keys of the run. A hub closes the
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
"""

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self, TypeAlias
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from lightrl.errors import ConfigError, PeerUnreachable, ProtocolError, WrongKey
from lightrl.keys import Access, coordinator_public_key, coordinator_secret, join_key, secret_of
from lightrl.messages import Hello, Message, TokenChunk, Welcome
from lightrl.transport.parts import Assembly, cut, in_pieces
from lightrl.transport.strangers import PATIENCE_S, Strangers
from lightrl.transport.validate import check_bounds, require_allowed
from lightrl.transport.zap import DOORKEEPER
from lightrl.wire import MAX_FRAME_BYTES, MESSAGES

MAX_DRAIN = 256  # messages taken before other tasks get their turn,
MAX_DRAIN_BYTES = 1 << 20  # and their size, but for the last one
LINGER_MS = 1000  # what closing may wait for the last messages
WILDCARD = "0.0.0.0"
SEPARATOR = "/"  # between the two halves of an identity
RANDOM_BYTES = 16  # in the second
MAX_TO_HUB_BYTES = 64 << 10  # of a frame: so much a stranger may send, before it is known as one
MAX_TO_NODE_BYTES = 1 << 20  # and whoever poses as the coordinator
MAX_WHOLE_BYTES = 32 << 20  # of a message to the hub that comes in parts
MAX_PARTIAL_BYTES = 256 << 20  # of all of them of which parts are still to come
MAX_WAITING = 1 << 14  # messages for a peer that it does not read: no order is cut into as many
MAX_WELCOMES = 8  # through one connection: each has the small files of the model in it
# batches after which a peer counts as heard, however much is left: its share was read
MAX_UNDRAINED = 16
CURVE_BYTES = 64  # that a frame grows by when it is encrypted, and more
BACKLOG = 1024  # connections that the kernel holds until ZeroMQ accepts them
HEARTBEAT_MS = 1000  # on an idle connection
SILENCE_MS = 3000  # a connection without a sign of life is broken; as node.lease_s
HANDSHAKE_MS = 3000
MAX_DOUBT = 12  # of the key, before it has worked once
# by a connection that was closed at once; a coordinator may just have ended, but not so often
SOON_DOUBT = 4
# by one that was closed later: most likely too many came with us, and some had to go
LATE_DOUBT = 1
RECONNECT_MS = 100  # at first, then longer, up to
MAX_RECONNECT_MS = 1000

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


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


def _key_pair(key: str) -> tuple[bytes, bytes]:
    """(public, secret), as ZeroMQ writes them, of who connects with this key."""
    secret = z85.encode(secret_of(key))
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
        return bool(self._sock.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def close(self) -> None:
        """Gives the last messages up to LINGER_MS to leave, in the background."""
        self._loop.remove_reader(self._fd)
        self._sock.close()


class Hub(_Socket):
    """The coordinator's end: many peers, that all have one of the run's two keys."""

    def __init__(self, address: str, key: str) -> None:
        """Listens on `address` (tcp://host:port, port * = any); `key` is the full key of the run.

        Raises ConfigError if it cannot.
        """
        secret = coordinator_secret(key)
        super().__init__(zmq.ROUTER, MAX_TO_HUB_BYTES)
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
        self._domain = f"hub-{secrets.token_hex(4)}"
        self._sock.set_string(zmq.ZAP_DOMAIN, self._domain)
        self._sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        keys = {Access.FULL: key, Access.JOIN: join_key(key)}
        DOORKEEPER.admit(
            self._domain, {z85.decode(_key_pair(k)[0]): a.value for a, k in keys.items()}
        )
        self._strangers = Strangers(self._sock, self._domain, self._readable.set)
        # of an identity, through which connection
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
            messages = self._take_in()
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

    def _take_in(self) -> list[tuple[int, Access, list[bytes]]]:
        """Messages that have arrived: through which connection, what that has proved, and their
        frames."""
        messages: list[tuple[int, Access, list[bytes]]] = []
        num_bytes = 0
        while len(messages) < MAX_DRAIN and num_bytes < MAX_DRAIN_BYTES:
            try:
                first = self._sock.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            connection = self._strangers.spoke(int(first.get(zmq.SRCFD)))
            access = Access(str(first.get("User-Id")))
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
        """Connects as a process of node or tool `name`. Raises PeerUnreachable if nothing listens
        there.

        `on_break` is called when the connection has broken: messages may be lost, in both
        directions; `on_back` when it stands again.
        """
        host, port = host_and_port(address)
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            raise PeerUnreachable(f"{address}: no answer; is the coordinator running?") from None
        writer.close()
        try:
            return cls(
                address,
                f"{name}{SEPARATOR}{secrets.token_hex(RANDOM_BYTES)}",
                key,
                on_break,
                on_back,
            )
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
        self.is_up = False  # else what is sent waits for the connection
        self._address = address
        self._was_up = False
        self._doubt = 0  # whether the key is that of the run
        self._connected_at = 0.0
        self._on_break, self._on_back = on_break, on_back
        public, secret = _key_pair(key)
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
        self._drain_monitor()  # only who has found nothing is told when there is something

    def send(self, message: Message) -> None:
        """Never blocks. What does not fit into one frame leaves in several."""
        frame, most = MESSAGES.encode(message), MAX_TO_HUB_BYTES - CURVE_BYTES
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
        """Waits for messages.

        Raises ProtocolError if the coordinator sends something unreadable, WrongKey if who listens
        there has another key and this link was never up.
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
                await asyncio.sleep(0)  # also if this was all: more comes while it is dealt with
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
            # Who was up before waits: its run comes back, whoever listens there meanwhile.
            is_late = self._loop.time() - self._connected_at >= PATIENCE_S
            self._doubt += LATE_DOUBT if is_late else SOON_DOUBT
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
