"""One connection of a puller to a source. Must not import torch.

Buckets are received by threads, which hash them by portions that stay in a core's cache.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightrl.errors import ProtocolError, WeightsError
from lightrl.system.addresses import split_known
from lightrl.system.threads import in_thread
from lightrl.weights.pull.swarm import PullSource
from lightrl.weights.serve.request import ANSWERS, QUEUED, SIGN_S, Request

CONNECT_LIMIT_S = 3.0
SILENCE_S = 5 * SIGN_S  # without a byte, after which a connection is closed

TICK_S = 0.25  # a thread that receives notes so often what has arrived
_TICK = struct.pack("ll", 0, int(TICK_S * 1e6))  # struct timeval
_PORTION = 256 << 10

Result = TypeVar("Result")

REFUSAL = "closed the connection (wrong ticket, or it no longer holds the version)"
OTHER_PROTOCOL = "does not serve weights as this version does"
FAILURES = (OSError, EOFError, ProtocolError)  # of a source


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to pull, as PublishWeights (or a DeltaOffer) describes it.

    Example: Wanted(4, "9f3a...", num_bytes=2112512, manifest_bytes=8190)
    """

    policy_version: int
    digest: str
    num_bytes: int
    manifest_bytes: int

    def request(self, what: bytes, node: str, source: PullSource, offset: int, size: int) -> bytes:
        digest = bytes.fromhex(self.digest)
        names = node.encode(), source.ticket
        return Request(what, digest, self.policy_version, offset, size, *names).pack()


class Connection:
    """Requests buckets of one source. Methods raise FAILURES; it is then of no use."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, address: tuple[str, int]) -> "Connection":
        loop, failure = asyncio.get_running_loop(), OSError("unknown host")
        async with asyncio.timeout(CONNECT_LIMIT_S):
            found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, known in found:
                sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.sock_connect(sock, known)
                    return cls(sock)
                except BaseException as e:
                    sock.close()
                    if not isinstance(e, OSError):
                        raise
                    failure = e
        raise failure

    async def ask(self, request: bytes, on_queued: Callable[[], object]) -> bytes:
        """Send a request and return the sign that is the answer."""
        await self._loop.sock_sendall(self._sock, request)
        while (sign := await self.receive(1)) == QUEUED:
            on_queued()
        if sign not in ANSWERS:
            raise ProtocolError(OTHER_PROTOCOL)
        return sign

    async def receive(self, size: int, on_bytes: Callable[[], object] = lambda: None) -> bytes:
        """Receive so many bytes; `on_bytes` is called whenever some arrive."""
        data = bytearray()
        while len(data) < size:
            async with asyncio.timeout(SILENCE_S):
                found = await self._loop.sock_recv(self._sock, min(size - len(data), _PORTION))
            if not found:
                raise EOFError(REFUSAL)
            data += found
            on_bytes()
        return bytes(data)

    async def in_thread(self, act: Callable[[socket.socket], Result]) -> Result:
        """Run `act` in a thread, with the socket, which blocks for TICK_S at a time meanwhile.
        Cancelled, this returns once `act` has."""
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        working = asyncio.ensure_future(in_thread(act, self._sock))
        try:
            result = await asyncio.shield(working)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):  # the source has gone
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
            await asyncio.wait({working})
            raise
        self._sock.setblocking(False)
        return result

    def close(self) -> None:
        self._sock.close()


def receive_into(sock: socket.socket, buffer: memoryview) -> int:
    """Receive up to a whole buffer in a thread, within SILENCE_S, and return how much. Raises
    OSError, EOFError."""
    for _ in range(int(SILENCE_S / TICK_S)):
        with contextlib.suppress(BlockingIOError):
            if n := sock.recv_into(buffer, len(buffer), socket.MSG_WAITALL):
                return n
            raise EOFError(REFUSAL)
    raise TimeoutError("timed out")


def parse_address(address: str) -> tuple[str, int]:
    """Return the (host, port) of a source. Raises WeightsError for an address without them."""
    if (found := split_known(address)) is None:
        raise WeightsError(f"{address[:80]!r}: a holder looks like host:port")
    return found
