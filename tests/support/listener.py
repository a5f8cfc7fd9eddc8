"""A listener of a test, whose connections are all closed when it is."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable


class Listener:
    """Awaits `serve` in a task for each connection of `sock`, and closes the connection after that.

    `asyncio.start_server` leaves a connection open whose task is cancelled before it has begun.
    """

    def __init__(
        self, sock: socket.socket, serve: Callable[[socket.socket], Awaitable[None]]
    ) -> None:
        self._sock = sock
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        sock.listen()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def cut(self) -> None:
        """Close the listener and cancel the tasks, as if the process had been killed."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Raises what a task has raised."""
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = self._sock.accept()
            sock.setblocking(False)
            task = self._loop.create_task(self._run(sock))
            self._tasks.add(task)
            task.add_done_callback(lambda _: sock.close())

    async def _run(self, sock: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            await self._serve(sock)
