"""What a node asks its sources beside the bytes of a version: which buckets they have, and the
manifest.

Owns one connection to each source while that has not got everything. Runs in the event loop.
Must not import torch.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

from lightrl.errors import ProtocolError
from lightrl.weights.pull.fetch import CONNECT_LIMIT_S, MAX_PAUSE_S, OTHER_PROTOCOL, REFUSAL, Fetch
from lightrl.weights.pull.swarm import EVERYTHING, Source
from lightrl.weights.serve.request import (
    ALL,
    ASK_HAVE,
    ASK_MANIFEST,
    BUSY,
    DATA,
    MISSING,
    PART,
    QUEUED,
    SIGN_S,
    VERIFIED,
    bitmap_size,
    read_records,
)

SILENCE_S = 5 * SIGN_S  # after which a connection is closed: a source reports every SIGN_S
_READ_BYTES = 64 << 10


class Follower:
    """Follows the sources of one pull."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.known = asyncio.Event()  # a source has reported what it has since this was cleared

    async def follow(self, source: Source) -> None:
        """Update what `source` has until it has everything or is dropped."""
        tries = 0
        while not source.is_dropped:
            begun_at = time.monotonic()
            try:
                await self._follow_once(source)
                break
            except (OSError, EOFError, ProtocolError) as e:
                self._fetch.note_trouble(source, e, is_refusal=isinstance(e, EOFError))
            finally:
                with self._fetch.lock:
                    if source.is_followed:
                        source.is_followed, source.has = False, 0
                        source.getting.clear()
            tries = 0 if time.monotonic() - begun_at > SILENCE_S else tries + 1
            pause_s = min(MAX_PAUSE_S, 0.05 * 2 ** min(tries, 10))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))

    async def manifest(self, source: Source) -> bytes | None:
        """Return the bytes of the manifest, not verified; None if this source has none, or is busy.
        Raises OSError, EOFError, ProtocolError."""
        async with self._asked(source, ASK_MANIFEST, self._fetch.wanted.manifest_bytes) as reader:
            while (sign := await _receive(reader, 1)) == QUEUED:
                self._fetch.note_progress()
            if sign == DATA:
                data = bytearray()
                while (left := self._fetch.wanted.manifest_bytes - len(data)) > 0:
                    data += await _receive_some(reader, min(_READ_BYTES, left))
                    self._fetch.note_progress()
                return bytes(data)
            if sign == BUSY:
                self._fetch.note_busy(source)
            elif sign != MISSING:
                raise ProtocolError(OTHER_PROTOCOL)
            return None

    async def _follow_once(self, source: Source) -> None:
        size = self._fetch.wanted.num_bytes
        async with self._asked(source, ASK_HAVE, size) as reader:
            while (sign := await _receive(reader, 1)) == QUEUED:
                with self._fetch.lock:
                    source.is_followed, source.refusals = True, 0
            if sign == PART:
                bitmap = await _receive(reader, bitmap_size(size))
                self._note(source, has=int.from_bytes(bitmap, "little"), is_followed=True)
                await self._read_changes(reader, source)
            elif sign == BUSY:  # a source with many connections has everything
                self._fetch.note_busy(source)
            elif sign != ALL:
                raise ProtocolError(OTHER_PROTOCOL)
            self._note(source, has=EVERYTHING, is_followed=False)

    async def _read_changes(self, reader: asyncio.StreamReader, source: Source) -> None:
        """Until the source has everything."""
        data = bytearray()
        while True:
            data += await _receive_some(reader, _READ_BYTES)
            now = time.monotonic()
            with self._fetch.lock:
                for kind, bucket in read_records(data):
                    if bucket >= self._fetch.swarm.num_buckets:
                        raise ProtocolError("has a bucket that there is not")
                    if kind == ALL:
                        return
                    if kind == QUEUED:
                        continue
                    source.news_at = now
                    if kind == VERIFIED:
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

    @contextlib.asynccontextmanager
    async def _asked(
        self, source: Source, what: bytes, size: int
    ) -> AsyncIterator[asyncio.StreamReader]:
        """A connection on which this was asked for. Raises OSError."""
        host, port = random.choice(source.addresses)
        async with asyncio.timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(self._fetch.wanted.request(what, self._fetch.node, source, 0, size))
            yield reader
        finally:
            writer.transport.abort()


async def _receive(reader: asyncio.StreamReader, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await _receive_some(reader, size - len(data))
    return data


async def _receive_some(reader: asyncio.StreamReader, size: int) -> bytes:
    async with asyncio.timeout(SILENCE_S):
        data = await reader.read(size)
    if not data:
        raise EOFError(REFUSAL)
    return data
