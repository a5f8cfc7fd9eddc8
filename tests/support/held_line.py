"""A trainer's line that a test holds: it sees nodes in the middle of a pull however slow the
machine is."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from lightrl.weights.pull.swarm import STALL_S
from lightrl.weights.serve.send import FileSender
from lightrl.weights.serve.server import WeightServer

TRICKLE_BYTES = 1 << 10
TRICKLE_S = STALL_S / 4  # a source that sends nothing at all would be given up


class HeldLine(FileSender):
    """While it is held, next to nothing comes through of what lies in a file from an offset on."""

    def __init__(self, bytes_per_s: float, held_from: int) -> None:
        super().__init__(bytes_per_s)
        self._held_from = held_from
        self._is_free = asyncio.Event()
        self._is_free.set()

    @classmethod
    def of(cls, server: WeightServer, bytes_per_s: float, held_from: int) -> "HeldLine":
        """The server's line from now on: before its first request."""
        server._sender = line = cls(bytes_per_s, held_from)
        return line

    def hold(self) -> None:
        self._is_free.clear()

    def free(self) -> None:
        self._is_free.set()

    @contextlib.asynccontextmanager
    async def turn(self, sock: socket.socket) -> AsyncIterator[None]:
        """Nodes that wait for what is held do not make others wait."""
        yield

    async def send(self, sock: socket.socket, file: int, offset: int, size: int) -> None:
        while size > TRICKLE_BYTES and offset >= self._held_from and not self._is_free.is_set():
            await super().send(sock, file, offset, TRICKLE_BYTES)
            offset, size = offset + TRICKLE_BYTES, size - TRICKLE_BYTES
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRICKLE_S):
                    await self._is_free.wait()
        await super().send(sock, file, offset, size)
