"""What a puller learns of its sources before and beside the transfer: what they have, and the
manifest.

Owns one connection to each source while that has not got everything. Runs in the event loop; the
bytes of the version are `fetch.py`'s business. Must not import torch.
"""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator

from lightrl.errors import ProtocolError
from lightrl.weights.pull.connections import CONNECT_LIMIT_S
from lightrl.weights.pull.fetch import MAX_PAUSE_S, REFUSAL, Fetch
from lightrl.weights.pull.swarm import EVERYTHING, Source
from lightrl.weights.serve.request import (
    ALL,
    ASK_HAVE,
    ASK_MANIFEST,
    BUSY,
    DATA,
    MISSING,
    PART,
    PROVED,
    QUEUED,
    SIGN_S,
    Request,
    bitmap_size,
    read_records,
)
from lightrl.weights.version.layout import num_buckets

SILENCE_S = 5 * SIGN_S  # of a connection on which signs are due
_READ_BYTES = 64 << 10


class Follower:
    """Of one version: `digest`, `policy_version`, size of its file, size of its manifest."""

    def __init__(
        self, fetch: Fetch, digest: str, policy_version: int, sizes: tuple[int, int], node: str
    ) -> None:
        self._fetch = fetch
        self._digest = bytes.fromhex(digest)
        self._policy_version = policy_version
        self._num_bytes, self._manifest_bytes = sizes
        self._node = node.encode()
        self.known = asyncio.Event()  # some source has said what it has, since this was cleared

    async def follow(self, source: Source) -> None:
        """Until it has everything, or is lost. What it has is in `source` meanwhile."""
        tries = 0
        while not source.is_lost:
            begun_at = time.monotonic()
            try:
                if await self._follow_once(source):
                    return
            except (OSError, EOFError, ProtocolError) as e:
                self._fetch.note_trouble(source, e, is_refusal=isinstance(e, EOFError))
            finally:
                with self._fetch.lock:
                    if source.is_followed:
                        source.is_followed, source.has = False, 0
                        source.getting.clear()
            tries = 0 if time.monotonic() - begun_at > SILENCE_S else tries + 1
            await asyncio.sleep(
                min(MAX_PAUSE_S, 0.05 * 2 ** min(tries, 10)) * random.uniform(0.5, 1)
            )

    async def manifest(self, source: Source) -> bytes | None:
        """Its bytes, not proved yet; None if this source has not got them, or has no place for us.
        Raises OSError, EOFError, ProtocolError."""
        sock = self._fetch.connections.take(source)
        async with self._connected(source, sock) as sock:
            await self._ask(sock, source, ASK_MANIFEST, self._manifest_bytes)
            while (sign := await self._receive(sock, 1)) == QUEUED:
                self._fetch.note_progress()
            if sign not in (DATA, MISSING, BUSY):
                raise ProtocolError("does not serve weights as this version does")
            if sign == BUSY:
                self._fetch.note_busy(source)
                return None
            data = await self._read_manifest(sock) if sign == DATA else None
            self._fetch.connections.keep(source, socket.socket(fileno=sock.detach()))
            return data

    async def _follow_once(self, source: Source) -> bool:
        """Whether it has everything, as far as we know."""
        async with self._connected(source) as sock:
            await self._ask(sock, source, ASK_HAVE, self._num_bytes)
            while (sign := await self._receive(sock, 1)) == QUEUED:
                with self._fetch.lock:
                    source.is_followed, source.refusals = True, 0
            if sign == PART:
                bitmap = await self._receive(sock, bitmap_size(self._num_bytes))
                self._note(source, has=int.from_bytes(bitmap, "little"), is_followed=True)
                await self._read_changes(sock, source)
            elif sign == BUSY:  # where many are, everything is
                self._fetch.note_busy(source)
                self._note(source, has=EVERYTHING, is_followed=False)
                return True
            elif sign != ALL:
                raise ProtocolError("does not serve weights as this version does")
            self._note(source, has=EVERYTHING, is_followed=False)
            self._fetch.connections.keep(source, socket.socket(fileno=sock.detach()))
            return True

    async def _read_changes(self, sock: socket.socket, source: Source) -> None:
        """Until it has everything."""
        data = bytearray()
        while True:
            data += await self._receive_some(sock, _READ_BYTES)
            now = time.monotonic()
            with self._fetch.lock:
                for kind, bucket in read_records(data):
                    if bucket >= num_buckets(self._num_bytes):
                        raise ProtocolError("has a bucket that there is not")
                    if kind == ALL:
                        return
                    if kind == QUEUED:
                        continue
                    source.news_at = now
                    if kind == PROVED:
                        source.has |= 1 << bucket
                        source.getting.pop(bucket, None)
                    elif not source.has >> bucket & 1:
                        source.getting.setdefault(bucket, now)
                self._fetch.lock.notify_all()

    def _note(self, source: Source, has: int, *, is_followed: bool) -> None:
        with self._fetch.lock:
            source.has, source.is_known, source.is_followed = has, True, is_followed
            source.failures = source.refusals = 0
            source.news_at = time.monotonic()
            source.getting.clear()
            self._fetch.lock.notify_all()
        self.known.set()

    async def _read_manifest(self, sock: socket.socket) -> bytes:
        data = bytearray()
        while len(data) < self._manifest_bytes:
            part = await self._receive_some(sock, min(1 << 20, self._manifest_bytes - len(data)))
            data += part
            self._fetch.note_progress()
        return bytes(data)

    @contextlib.asynccontextmanager
    async def _connected(
        self, source: Source, sock: socket.socket | None = None
    ) -> AsyncIterator[socket.socket]:
        """`sock`, or a new connection; closed at the end. Raises OSError."""
        if sock is None:
            sock = await self._connect(source)
        sock.setblocking(False)
        try:
            yield sock
        finally:
            sock.close()

    async def _connect(self, source: Source) -> socket.socket:
        loop = asyncio.get_running_loop()
        host, port = random.choice(source.addresses)
        async with asyncio.timeout(CONNECT_LIMIT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(sock, address)
            except BaseException:
                sock.close()
                raise
        return sock

    async def _ask(self, sock: socket.socket, source: Source, what: bytes, size: int) -> None:
        request = Request(
            what, self._digest, self._policy_version, 0, size, self._node, source.ticket
        )
        await asyncio.get_running_loop().sock_sendall(sock, request.pack())

    async def _receive(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await self._receive_some(sock, size - len(data))
        return data

    async def _receive_some(self, sock: socket.socket, size: int) -> bytes:
        async with asyncio.timeout(SILENCE_S):
            data = await asyncio.get_running_loop().sock_recv(sock, size)
        if not data:
            raise EOFError(REFUSAL)
        return data
