"""What lies between a puller and a holder, and may cut or hold up what passes."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from lightrl.system.addresses import join_address

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
        self._tasks = set[asyncio.Task[None]]()
        if self._sock is None:
            self._sock = bound_socket()
        self._server = await asyncio.start_server(self._serve, sock=self._sock)
        return address_of(self._sock)

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """As if it had been killed."""
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        left = self._allow(self.num_connections)
        self.num_connections += 1
        host, _, port = self._target.rpartition(":")
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            writer.close()
            return

        async def upstream() -> None:
            while data := await reader.read(1 << 16):
                up_writer.write(data)

        asking = asyncio.create_task(upstream())
        try:
            while data := await up_reader.read(1 << 16):
                passed = data[:left]
                writer.write(passed)
                left -= len(passed)
                self.num_bytes += len(passed)
                if left == 0:
                    self.stalled.set()
                    if self._released is None:
                        break
                    await self._released.wait()
                    writer.write(data[len(passed) :])
                    left = EVERYTHING
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            asking.cancel()
            for w in (writer, up_writer):
                w.close()
                with contextlib.suppress(ConnectionError):
                    await w.wait_closed()
