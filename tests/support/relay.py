"""What lies between a puller and a holder, and may cut or hold up what passes."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from lightrl.system.addresses import join_address
from tests.support.listener import Listener

EVERYTHING = 1 << 62


def bound_socket() -> socket.socket:
    """It refuses connections until somebody listens on it."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def address_of(sock: socket.socket) -> str:
    return join_address("127.0.0.1", sock.getsockname()[1])


class Relay:
    """`allow(n)` says how many reply bytes of connection n pass."""

    def __init__(
        self,
        target: str,
        allow: Callable[[int], int],
        released: asyncio.Event | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        self._sock = sock  # bound already
        self._target = target
        self._allow = allow
        self._released = released  # None: cut there; else wait for it, then let everything pass
        self.stalled = asyncio.Event()
        self.num_connections = 0
        self.num_bytes = 0  # that passed

    async def __aenter__(self) -> str:
        if self._sock is None:
            self._sock = bound_socket()
        self._listener = Listener(self._sock, self._serve)
        return address_of(self._sock)

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    def cut(self) -> None:
        """As if it had been killed."""
        self._listener.cut()

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        left = self._allow(self.num_connections)
        self.num_connections += 1
        host, _, port = self._target.rpartition(":")
        with socket.socket() as up:
            up.setblocking(False)
            await loop.sock_connect(up, (host, int(port)))
            asking = asyncio.create_task(_pass(sock, up))
            try:
                while data := await loop.sock_recv(up, 1 << 16):
                    passed = data[:left]
                    await loop.sock_sendall(sock, passed)
                    left -= len(passed)
                    self.num_bytes += len(passed)
                    if left == 0:
                        self.stalled.set()
                        if self._released is None:
                            break
                        await self._released.wait()
                        await loop.sock_sendall(sock, data[len(passed) :])
                        left = EVERYTHING
            finally:
                asking.cancel()
                await asyncio.wait({asking})  # it uses both sockets


async def _pass(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while data := await loop.sock_recv(source, 1 << 16):
            await loop.sock_sendall(sink, data)
