"""How the bytes of a file get to a peer: threads move them, the event loop waits for slow peers.

Must not import torch; knows nothing of requests.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from lightrl.weights.serve.turns import Turn

IDLE_LIMIT_S = 10.0  # without a single byte, or without a request
STALL_S = 1.0  # a peer that takes nothing for so long passes its turn on

_SEND_BYTES = 16 << 20  # one stint of a sending thread
# a thread waits so long for a slow peer, then the event loop does; struct timeval
_SEND_PATIENCE = struct.pack("ll", 0, 50_000)
_SEND_THREADS = 16
_THROTTLED_BYTES = 64 << 10


class Sender:
    """Its threads end with `close`."""

    def __init__(self, max_bytes_per_s: float | None) -> None:
        self._pace = None if max_bytes_per_s is None else Pace(max_bytes_per_s)
        self._threads = ThreadPoolExecutor(_SEND_THREADS, thread_name_prefix="weights-send")

    async def send(
        self, sock: socket.socket, file: int, offset: int, size: int, turn: Turn
    ) -> None:
        """Raises OSError, EOFError, TimeoutError. Cancelled, it returns once no thread uses the
        file."""
        loop = asyncio.get_running_loop()
        while size > 0:
            portion = min(size, _SEND_BYTES)
            arguments = (sock, file, offset, portion, self._pace)
            stint = loop.run_in_executor(self._threads, _send_some, *arguments)
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
    """Sends up to `size` bytes; fewer if the peer does not take them. Returns how many. Runs in a
    thread. The socket blocks meanwhile: one call sends as much as comes through without a pause,
    where each of many would have to wait for the interpreter's lock."""
    sent = 0
    os.set_blocking(sock.fileno(), True)  # the socket object, which is the loop's, does not know
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
