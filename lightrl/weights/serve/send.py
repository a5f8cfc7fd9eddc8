"""Send the bytes of a file to a node in the event loop, by `sendfile`, which copies nothing.

Must not import torch.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator

from lightrl.system.threads import in_thread
from lightrl.weights.serve.request import QUEUED, SIGN_S

IDLE_LIMIT_S = 10.0  # without a single byte, or without a request
TURN_S = 5.0  # after which the next node is sent to beside a slow one
SHARED_TURNS = 3  # of nodes that relay what they get: the sooner the first of them has it

_PORTION = 1 << 20  # of one call, so that the event loop serves others, too
_THROTTLED_PORTION = 64 << 10


class FileSender:
    """Sends to all nodes of one server."""

    def __init__(self, max_bytes_per_s: float | None) -> None:
        """`max_bytes_per_s`: of all nodes together, as on a narrow line."""
        self._bytes_per_s = max_bytes_per_s
        self._free_at = 0.0  # when the bytes so far have passed the narrow line
        self._turns = asyncio.Semaphore(SHARED_TURNS)

    async def send(self, sock: socket.socket, file: int, offset: int, size: int) -> None:
        """Raises OSError, EOFError, TimeoutError."""
        portion = _PORTION if self._bytes_per_s is None else _THROTTLED_PORTION
        while size > 0:
            try:
                most = min(size, portion)
                await _read(file, offset, most)
                sent = os.sendfile(sock.fileno(), file, offset, most)
            except BlockingIOError:
                sent = 0
            else:
                if not sent:
                    raise EOFError("the file is shorter than it was")
                await self._pace(sent)
            offset, size = offset + sent, size - sent
            if size > 0:
                async with asyncio.timeout(IDLE_LIMIT_S):
                    await _writable(sock)

    @contextlib.asynccontextmanager
    async def turn(self, sock: socket.socket) -> AsyncIterator[None]:
        """Wait until fewer than SHARED_TURNS nodes are sent to, and send QUEUED meanwhile. A turn
        ends after TURN_S at the latest. Raises OSError."""
        loop = asyncio.get_running_loop()
        acquiring = asyncio.ensure_future(self._turns.acquire())
        try:
            await asyncio.sleep(0)  # a free turn is acquired now
            while not acquiring.done():
                await loop.sock_sendall(sock, QUEUED)
                await asyncio.wait({acquiring}, timeout=SIGN_S)
        except BaseException:
            if not acquiring.cancel():
                self._turns.release()
            raise
        end = contextlib.ExitStack()
        end.callback(self._turns.release)
        end.callback(loop.call_later(TURN_S, end.close).cancel)
        with end:
            yield

    async def _pace(self, num_bytes: int) -> None:
        if self._bytes_per_s is not None:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            await asyncio.sleep(self._free_at - now)


async def _read(file: int, offset: int, size: int) -> None:
    """Read a part from the disk, in a thread, unless the end of it is in memory."""
    with contextlib.suppress(OSError, AttributeError):  # tmpfs does not support the flag
        try:
            os.preadv(file, [bytearray(1)], offset + size - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            await in_thread(os.pread, file, size, offset)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)
