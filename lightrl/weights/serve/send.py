"""How the bytes of a file get to a node: in turns, by threads; the event loop waits for slow nodes.

Must not import torch.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from lightrl.weights.serve.request import SIGN_S

IDLE_LIMIT_S = 10.0  # without a single byte, or without a request
TURN_S = 10.0  # at most
STALL_S = 1.0  # a node that takes nothing for so long ends its turn

_SEND_BYTES = 16 << 20  # by one call in a thread
# a thread waits so long for a slow node, then the event loop does; struct timeval
_SEND_PATIENCE = struct.pack("ll", 0, 50_000)
_SEND_THREADS = 16
_THROTTLED_BYTES = 64 << 10


class Turns:
    """So many nodes are sent to at a time, the others in the order in which they asked.

    A turn lasts for one request. A slow node leaves line to others, so its turn is ended, and the
    next one begins beside it.
    """

    def __init__(self, num_places: int) -> None:
        self._places = asyncio.Semaphore(num_places)

    @contextlib.asynccontextmanager
    async def acquire(
        self, on_queued: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn; the function given ends it early. Meanwhile `on_queued` is awaited every
        SIGN_S, and may raise."""
        await self._wait(on_queued)
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._places.release()

        limit = asyncio.get_running_loop().call_later(TURN_S, end)
        try:
            yield end
        finally:
            limit.cancel()
            end()

    async def _wait(self, on_queued: Callable[[], Awaitable[None]]) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        acquiring = asyncio.ensure_future(self._places.acquire())
        try:
            while not acquiring.done():
                await on_queued()
                await asyncio.wait({acquiring}, timeout=SIGN_S)
        except BaseException:
            if not acquiring.cancel():
                self._places.release()
            raise


class Sender:
    """Its threads end with `close`."""

    def __init__(self, max_bytes_per_s: float | None) -> None:
        self._pace = None if max_bytes_per_s is None else Pace(max_bytes_per_s)
        self._threads = ThreadPoolExecutor(_SEND_THREADS, thread_name_prefix="weights-send")

    async def send(
        self, sock: socket.socket, file: int, offset: int, size: int, end_turn: Callable[[], None]
    ) -> None:
        """Raises OSError, EOFError, TimeoutError. Cancelled, it returns once no thread uses the
        file."""
        loop = asyncio.get_running_loop()
        while size > 0:
            portion = min(size, _SEND_BYTES)
            arguments = (sock, file, offset, portion, self._pace)
            sending = loop.run_in_executor(self._threads, _send_some, *arguments)
            try:
                sent = await asyncio.shield(sending)
            except asyncio.CancelledError:
                with contextlib.suppress(OSError):  # the node has gone
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
                await asyncio.gather(sending, return_exceptions=True)
                raise
            offset, size = offset + sent, size - sent
            if size > 0:
                stalled = loop.call_later(STALL_S, end_turn)
                try:
                    async with asyncio.timeout(IDLE_LIMIT_S):
                        await _writable(sock)
                finally:
                    stalled.cancel()

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class Pace:
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


def _send_some(sock: socket.socket, file: int, offset: int, size: int, pace: Pace | None) -> int:
    """Send up to `size` bytes in a thread, fewer if the node does not take them, and return how
    many. The socket blocks meanwhile: one call sends all that the line takes, where each of many
    would wait for the interpreter's lock."""
    sent = 0
    os.set_blocking(sock.fileno(), True)  # not by the socket object, which the loop uses
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_PATIENCE)
        while sent < size:
            portion = size - sent if pace is None else min(size - sent, _THROTTLED_BYTES)
            n = os.sendfile(sock.fileno(), file, offset + sent, portion)
            if n == 0:
                raise EOFError("the file is shorter than it was")
            if pace is not None:
                pace.wait(n)
            sent += n
    except BlockingIOError:
        return sent
    finally:
        os.set_blocking(sock.fileno(), False)
    return sent


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)
