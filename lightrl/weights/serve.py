"""The holder's side of a weight pull: byte ranges of published versions over TCP, to nodes with a ticket.

Owns open versions and connections. The event loop only accepts, reads requests and waits; threads move
the bytes. Must not import torch; decides neither which versions exist nor who may have them.

A connection carries any number of requests, one after the other. A request is `REQUEST`, the name of the
node that asks and its ticket; the reply is exactly the bytes asked for. Whatever is wrong with a request
(name, ticket, version, range), the answer is a closed connection, so that a stranger learns nothing.

A ticket is for one node and one version (keys.pull_ticket); it expires when the version is not held any more.
"""

import asyncio
import contextlib
import hmac
import os
import select
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import WeightsError
from lightrl.keys import pull_ticket
from lightrl.messages import Manifest
from lightrl.weights import manifest as m

REQUEST = struct.Struct("<8sQQQBB")  # magic, policy_version, offset, size, lengths of name and ticket
MAGIC = b"LRPULL2\n"
MAX_NAME_BYTES = 255
MAX_TICKET_BYTES = 128
MIN_SECRET = 16  # characters: an empty one would let everybody in
MAX_CONNECTIONS = 512
BACKLOG = 1024  # peers that wait for a place; the kernel may allow fewer
KEPT_VERSIONS = 2
IDLE_LIMIT_S = 10.0  # without a single byte, or without a request

_SEND_BYTES = 16 << 20  # one turn of a sending thread
_SEND_PATIENCE_MS = 50  # a thread waits so long for a slow peer, then the event loop does
_SEND_THREADS = 16


def pack_request(policy_version: int, offset: int, size: int, node: bytes, ticket: bytes) -> bytes:
    """Asks for `size` bytes of a version's file from `offset` on."""
    return REQUEST.pack(MAGIC, policy_version, offset, size, len(node), len(ticket)) + node + ticket


@dataclass(slots=True)
class _Held:
    """A published version. The open file outlives its deletion; closed when nobody sends it any more."""

    policy_version: int
    secret: str
    file: int
    size: int
    num_users: int = 0
    is_retired: bool = False

    def admits(self, node: bytes, ticket: bytes) -> bool:
        expected = pull_ticket(self.secret, node.decode(errors="replace"), self.policy_version)
        return hmac.compare_digest(ticket, expected.encode())

    def release(self) -> None:
        if self.is_retired and self.num_users == 0:
            os.close(self.file)
            self.file = -1


class WeightServer:
    """Serves the last two versions published. `await start(host)` once; `await close()` at the end."""

    def __init__(self, max_connections: int = MAX_CONNECTIONS) -> None:
        self._held: dict[int, _Held] = {}  # in the order of publication
        self._max_connections = max_connections
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(_SEND_THREADS, thread_name_prefix="weights-send")

    async def start(self, host: str) -> str:
        """Listens on a free port of `host`; returns "host:port". Raises WeightsError if it cannot."""
        try:
            family, kind, protocol, _, address = (
                await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            )[0]
            self._listener = socket.socket(family, kind, protocol)
            self._listener.setblocking(False)
            self._listener.bind(address)
            self._listener.listen(BACKLOG)
        except OSError as e:
            raise WeightsError(f"cannot serve weights on {host}: {e}") from e
        self._listen()
        return format_address(host, self._listener.getsockname()[1])

    def publish(self, manifest: Manifest, path: Path, secret: str) -> None:
        """From now on serves the version in `path`; the file may be deleted. Raises WeightsError.

        The tickets of nodes are derived from `secret` (keys.pull_ticket).
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
            raise WeightsError(f"{path}: has {size} bytes, its manifest says {m.num_bytes(manifest)}")
        version = manifest.policy_version
        self._retire(version)
        self._held[version] = _Held(version, secret, file, size)
        while len(self._held) > KEPT_VERSIONS:
            self._retire(next(iter(self._held)))

    async def close(self) -> None:
        """Stops serving at once; transfers under way are cut."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
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

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """A callback and not a task, which could be cancelled when it already has a connection."""
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listener.accept()
        except OSError:  # the peer has gone already, or no descriptor is free
            loop.remove_reader(listener)
            loop.call_later(0.01, self._listen)
            return
        sock.setblocking(False)
        task = loop.create_task(self._serve(sock))
        self._connections.add(task)
        task.add_done_callback(lambda task: self._ended(task, sock))
        if len(self._connections) >= self._max_connections:
            # Further peers wait in the listen queue: a closed connection would say that we lack the version.
            loop.remove_reader(listener)

    def _ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        """Closes here and not in the task, which may be cancelled before it has begun."""
        self._connections.discard(task)
        sock.close()
        self._listen()

    async def _serve(self, sock: socket.socket) -> None:
        """Answers one peer until it goes, says something wrong or falls silent."""
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                async with asyncio.timeout(IDLE_LIMIT_S):
                    magic, version, offset, size, name_size, ticket_size = REQUEST.unpack(
                        await _read(sock, REQUEST.size)
                    )
                    if magic != MAGIC or not name_size or not 0 < ticket_size <= MAX_TICKET_BYTES:
                        return
                    node = await _read(sock, name_size)
                    ticket = await _read(sock, ticket_size)
                held = self._held.get(version)
                if held is None or not held.admits(node, ticket):
                    return
                if offset > held.size or size > held.size - offset:
                    return
                await self._send(sock, held, offset, size)

    async def _send(self, sock: socket.socket, held: _Held, offset: int, size: int) -> None:
        loop = asyncio.get_running_loop()
        held.num_users += 1  # keeps the file open if the version is retired meanwhile
        try:
            while size > 0:
                turn = loop.run_in_executor(
                    self._threads, _send_some, sock.fileno(), held.file, offset, min(size, _SEND_BYTES)
                )
                try:
                    sent = await asyncio.shield(turn)
                except asyncio.CancelledError:
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
                    await asyncio.gather(turn, return_exceptions=True)
                    raise
                offset, size = offset + sent, size - sent
                if size > 0:
                    async with asyncio.timeout(IDLE_LIMIT_S):
                        await _writable(sock)
        finally:
            held.num_users -= 1
            held.release()


def _send_some(sock: int, file: int, offset: int, size: int) -> int:
    """Sends up to `size` bytes; fewer if the peer does not take them. Returns how many. Runs in a thread."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    sent = 0
    while sent < size:
        try:
            n = os.sendfile(sock, file, offset + sent, size - sent)
        except BlockingIOError:
            if not poll.poll(_SEND_PATIENCE_MS):
                return sent
            continue
        if n == 0:
            raise EOFError("the file is shorter than it was")
        sent += n
    return sent


async def _read(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises EOFError if the peer has gone."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def format_address(host: str, port: int) -> str:
    """Example: "10.0.0.1:41873", "[::1]:41873"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
