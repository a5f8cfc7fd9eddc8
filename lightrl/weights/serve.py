"""The holder's side of a weight pull: byte ranges of published versions over TCP, to nodes with a
ticket.

Owns open versions and the connections of those who have shown a ticket; `door.py` has the others.
The event loop only accepts, reads requests and waits; threads move the bytes. Must not import
torch; decides neither which versions exist nor who may have them. What is said is in `request.py`.

A ticket is for one node and one version (lightrl/tickets.py); it expires when that is not held any
more. Waiting costs a descriptor and nothing else: any number of nodes wait for their turn, and are
told so.
"""

import asyncio
import contextlib
import hmac
import os
import resource
import select
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import ProtocolError, WeightsError
from lightrl.messages import Manifest
from lightrl.system.addresses import join_address
from lightrl.tickets import pull_ticket
from lightrl.weights import manifest as m
from lightrl.weights.door import Door
from lightrl.weights.request import BUSY, DATA, QUEUED, Request, num_missing, unpack
from lightrl.weights.turns import Turn, Turns

MIN_SECRET = 16  # characters: an empty one would let everybody in
MAX_CONNECTIONS = 4096  # with a ticket; fewer where this process may not open as many files
MAX_CALLERS = 512  # without one, likewise
MAX_OF_A_NODE = 8  # connections: a node that has gone bad must not have them all
TURNS_AT_ONCE = 64  # requests that are answered at once
CROWD = 4 * TURNS_AT_ONCE  # connections from which on each node has only one
BACKLOG = 4096  # peers that wait to be accepted; the kernel may allow fewer
KEPT_VERSIONS = 2
IDLE_LIMIT_S = 10.0  # without a single byte, or without a request
STALL_S = 1.0  # a peer that takes nothing for so long passes its turn on

_SEND_BYTES = 16 << 20  # one stint of a sending thread
_SEND_PATIENCE_MS = 50  # a thread waits so long for a slow peer, then the event loop does
_SEND_THREADS = 16
_THROTTLED_BYTES = 64 << 10


@dataclass(slots=True)
class _Held:
    """A published version. The open file outlives its deletion; closed when nobody sends it any
    more."""

    policy_version: int
    secret: str
    file: int
    size: int
    num_users: int = 0
    is_retired: bool = False

    def admits(self, request: Request) -> bool:
        expected = pull_ticket(
            self.secret, request.node.decode(errors="replace"), self.policy_version
        )
        return hmac.compare_digest(request.ticket, expected.encode())

    def has(self, request: Request) -> bool:
        return request.offset <= self.size and request.size <= self.size - request.offset

    def release(self) -> None:
        if self.is_retired and self.num_users == 0:
            os.close(self.file)
            self.file = -1


class WeightServer:
    """Serves the last two versions published. `await start(host)` once; `await close()` at the
    end."""

    def __init__(
        self, max_connections: int = MAX_CONNECTIONS, max_bytes_per_s: float | None = None
    ) -> None:
        """`max_bytes_per_s`: what all peers together get, None = what the line can take."""
        self._held: dict[int, _Held] = {}  # in the order of publication
        self._max_connections = max_connections
        self._pace = None if max_bytes_per_s is None else _Pace(max_bytes_per_s)
        self._door: Door | None = None
        self._connections: dict[asyncio.Task[None], bytes] = {}  # and the nodes that they belong to
        self._num_of: Counter[bytes] = Counter()  # connections of each node
        self._turns = Turns(TURNS_AT_ONCE)
        self._threads = ThreadPoolExecutor(_SEND_THREADS, thread_name_prefix="weights-send")

    async def start(self, host: str, port: int = 0) -> str:
        """Listens on `port` of `host`, 0 = any; returns "host:port". Raises WeightsError if it
        cannot."""
        listener: socket.socket | None = None
        try:
            family, kind, protocol, _, address = (
                await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setblocking(False)
            # as that of a trainer that died
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as e:
            if listener is not None:
                listener.close()
            where = join_address(host, port) if port else host
            raise WeightsError(f"cannot serve weights on {where}: {e.strerror or e}") from e
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = min(self._max_connections, limit // 2)
        self._door = Door(min(MAX_CALLERS, limit // 4), self._admit)
        self._door.open(listener)
        return join_address(host, listener.getsockname()[1])

    def publish(self, manifest: Manifest, path: Path, secret: str) -> None:
        """From now on serves the version in `path`; the file may be deleted. Raises WeightsError.

        The tickets of nodes are derived from `secret` (tickets.pull_ticket).
        """
        if len(secret) < MIN_SECRET:
            raise WeightsError(f"a secret has {MIN_SECRET} characters or more, not {len(secret)}")
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise WeightsError(f"{path}: cannot be served: {e.strerror}") from e
        size = os.fstat(file).st_size
        if size != m.num_bytes(manifest):
            os.close(file)
            raise WeightsError(
                f"{path}: has {size} bytes, its manifest says {m.num_bytes(manifest)}"
            )
        version = manifest.policy_version
        self._retire(version)
        self._held[version] = _Held(version, secret, file, size)
        while len(self._held) > KEPT_VERSIONS:
            self._retire(next(iter(self._held)))

    async def close(self) -> None:
        """Stops serving at once; transfers under way are cut."""
        if self._door is not None:
            self._door.close()
            self._door = None
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for version in list(self._held):
            self._retire(version)
        self._threads.shutdown(wait=False)

    def _retire(self, version: int) -> None:
        held = self._held.pop(version, None)
        if held is not None:
            held.is_retired = True
            held.release()

    def _admit(self, sock: socket.socket, request: Request) -> None:
        """Takes a connection from the door, with its first request."""
        if self._find(request) is None:
            sock.close()
        elif not self._has_place(request.node):
            with contextlib.suppress(OSError):
                sock.send(BUSY)
            sock.close()
        else:
            task = asyncio.get_running_loop().create_task(self._serve(sock, request))
            self._connections[task] = request.node
            self._num_of[request.node] += 1
            task.add_done_callback(lambda task: self._ended(task, sock))

    def _find(self, request: Request) -> _Held | None:
        """The version of which this is a part, if the node may have it."""
        held = self._held.get(request.policy_version)
        return held if held is not None and held.admits(request) and held.has(request) else None

    def _has_place(self, node: bytes) -> bool:
        """Where there are many, a node gets the one connection that it needs."""
        theirs, all_of_them = self._num_of[node], len(self._connections)
        return (
            theirs < MAX_OF_A_NODE
            and all_of_them < self._max_connections
            and (theirs == 0 or all_of_them < CROWD)
        )

    def _is_spare(self, node: bytes) -> bool:
        """Whether this node should make do with one connection fewer."""
        return self._num_of[node] > 1 and len(self._connections) > CROWD

    def _ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        """Closes here and not in the task, which may be cancelled before it has begun."""
        node = self._connections.pop(task)
        self._num_of[node] -= 1
        if not self._num_of[node]:
            del self._num_of[node]
        sock.close()

    async def _serve(self, sock: socket.socket, first: Request) -> None:
        """Answers one peer until it goes, says something wrong or falls silent."""
        request, loop = first, asyncio.get_running_loop()
        with contextlib.suppress(OSError, EOFError, ProtocolError, TimeoutError):
            _notice_the_dead(sock)
            while (held := self._find(request)) is not None and request.node == first.node:
                if self._is_spare(first.node):
                    await loop.sock_sendall(sock, BUSY)
                    return
                await self._answer(sock, held, request)
                async with asyncio.timeout(IDLE_LIMIT_S):
                    request = await _next_request(sock)

    async def _answer(self, sock: socket.socket, held: _Held, request: Request) -> None:
        loop = asyncio.get_running_loop()
        held.num_users += 1  # keeps the file open if the version is retired meanwhile
        try:
            async with self._turns.acquire(lambda: loop.sock_sendall(sock, QUEUED)) as turn:
                await loop.sock_sendall(sock, DATA)
                await self._send(sock, held.file, request.offset, request.size, turn)
        finally:
            held.num_users -= 1
            held.release()

    async def _send(
        self, sock: socket.socket, file: int, offset: int, size: int, turn: Turn
    ) -> None:
        loop = asyncio.get_running_loop()
        while size > 0:
            stint = loop.run_in_executor(
                self._threads,
                _send_some,
                sock.fileno(),
                file,
                offset,
                min(size, _SEND_BYTES),
                self._pace,
            )
            try:
                sent = await asyncio.shield(stint)
            except asyncio.CancelledError:
                with contextlib.suppress(OSError):  # it has gone already
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
                await asyncio.gather(stint, return_exceptions=True)
                raise
            offset, size = offset + sent, size - sent
            if size > 0:
                stalled = loop.call_later(STALL_S, turn.pass_on)
                try:
                    async with asyncio.timeout(IDLE_LIMIT_S):
                        await _writable(sock)
                finally:
                    stalled.cancel()


class _Pace:
    """So many bytes a second for all threads together, as on a narrow line."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)


def _send_some(sock: int, file: int, offset: int, size: int, pace: _Pace | None) -> int:
    """Sends up to `size` bytes; fewer if the peer does not take them. Returns how many. Runs in a
    thread."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    sent = 0
    while sent < size:
        portion = size - sent if pace is None else min(size - sent, _THROTTLED_BYTES)
        try:
            n = os.sendfile(sock, file, offset + sent, portion)
        except BlockingIOError:
            if not poll.poll(_SEND_PATIENCE_MS):
                return sent
            continue
        if n == 0:
            raise EOFError("the file is shorter than it was")
        if pace is not None:
            pace.wait(n)
        sent += n
    return sent


def _notice_the_dead(sock: socket.socket) -> None:
    """A peer that vanished while it was queued would be told so for a quarter of an hour."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IDLE_LIMIT_S * 1000))


async def _next_request(sock: socket.socket) -> Request:
    """Raises EOFError if the peer has gone, ProtocolError if it asks for something else."""
    loop = asyncio.get_running_loop()
    data = b""
    while missing := num_missing(data):
        part = await loop.sock_recv(sock, missing)
        if not part:
            raise EOFError
        data += part
    return unpack(data)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)
