"""Limit the number of connections to the router that are not authenticated yet.

ZeroMQ accepts every connection and holds a descriptor and a frame's worth of memory for it until
its handshake ends or times out. Beyond the limit the oldest connection of the address with the most
connections is closed; an honest peer's handshake takes less time than that.

A connection counts as authenticated once a message has arrived through it.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightrl.system import open_files

MOST = 1024  # connections: 80 MiB, if each sends all it may
LEAST = 8  # connections, however few descriptors are free
CHECK_S = 0.02  # between two checks
PATIENCE_S = 0.25  # a younger connection is never closed: an honest handshake may take this long
# counted between two checks: in a longer turn of the event loop no peer could proceed
MAX_TURN_S = 2 * CHECK_S
# checks in a row that close nothing because unread messages may authenticate connections
MAX_UNREAD = 10


@dataclass(slots=True)
class _Connection:
    # by a clock that stops while this loop is busy
    since: float
    # "" = not looked up yet
    address: str = ""


class UnauthenticatedPeers:
    """Watches the connections of a ROUTER, and closes the oldest ones beyond the limit."""

    def __init__(self, sock: "zmq.Socket[bytes]", name: str, wake: Callable[[], None]) -> None:
        """Watch `sock` before it listens; `name` is unique in this process.

        `wake` is called when `gone` grows or messages are unread: reading the socket's events
        resets its edge-triggered descriptor.
        """
        # connections that have ended and whose messages have all arrived
        self.gone: set[int] = set()
        self._sock = sock
        self._wake = wake
        self._ending: set[int] = set()
        self._waiting: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._shut_down: set[int] = set()  # descriptors that ZeroMQ has not closed yet
        # descriptor -> number, of authenticated connections
        self._known: dict[int, int] = {}
        self._num_known = 0
        self._port = 0
        # ZeroMQ's listening socket: its descriptor, a duplicate, and a socket to put in its place
        self._listening: tuple[int, int, socket.socket] | None = None
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # to inspect a connection when no descriptor is free
        self._spare = os.dup(self._null)
        self._loop = asyncio.get_running_loop()
        self._next_check: asyncio.TimerHandle | None = None
        self._checked_at = self._loop.time()
        self._num_unread = 0  # checks in a row
        self._clock = 0.0  # seconds during which this loop was responsive
        self._monitor: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)  # else ZeroMQ's thread would wait for this one
        events = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        sock.monitor(f"inproc://handshakes-{name}", events)
        self._monitor.connect(f"inproc://handshakes-{name}")
        self._fd = self._monitor.fileno()
        self._loop.add_reader(self._fd, self._check_soon)

    def listens_on(self, port: int) -> None:
        self._port = port
        self._read_events()
        self._check_soon()

    def __len__(self) -> int:
        return len(self._waiting)

    def count(self) -> tuple[int, int]:
        """Return the numbers of authenticated and of unauthenticated connections."""
        self._read_events()
        return len(self._known), len(self._waiting) + len(self._shut_down)

    def mark_authenticated(self, descriptor: int) -> int:
        """Mark a connection as authenticated, and return its unique number."""
        if descriptor not in self._known:
            self._read_events()  # its ACCEPTED event may not have been read yet
            self._waiting.pop(descriptor, None)
            self._shut_down.discard(descriptor)
            self._num_known += 1
            self._known[descriptor] = self._num_known
        return self._known[descriptor]

    def end(self, connection: int) -> None:
        """Close an authenticated connection, if it is still open."""
        self._read_events()  # its descriptor may belong to another connection by now
        for descriptor in [d for d, known in self._known.items() if known == connection]:
            self._shut(descriptor)
        self._check_soon()

    def close(self) -> None:
        """Stop watching. Call before the socket is closed."""
        self._loop.remove_reader(self._fd)
        if self._next_check is not None:
            self._next_check.cancel()
        self._sock.disable_monitor()
        self._monitor.close(linger=0)
        if self._listening is not None:
            with open_files.insisting:
                open_files.listeners.remove(self._accepts_nothing)
            os.close(self._listening[1])
            self._listening[2].close()
        os.close(self._spare)
        os.close(self._null)

    def _check_soon(self) -> None:
        if self._next_check is None:
            self._next_check = self._loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._next_check = None
        now = self._loop.time()
        self._clock += min(now - self._checked_at, MAX_TURN_S)
        self._checked_at = now
        # ZeroMQ reports a disconnect before it delivers the last messages, so a connection counts
        # as gone one check later.
        if self._ending:
            self.gone |= self._ending
            self._ending = set()
            self._wake()
        self._read_events()
        surplus = len(self._waiting) - self._most() if len(self._waiting) > LEAST else 0
        if surplus > 0:
            if not self._may_be_read_soon():
                for descriptor in self._to_close(surplus):
                    self._shut(descriptor)
            self._check_soon()

    def _may_be_read_soon(self) -> bool:
        """Return whether unread messages may authenticate some connections."""
        has_input = bool(int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        self._num_unread = (
            self._num_unread + 1 if has_input and self._num_unread < MAX_UNREAD else 0
        )
        if has_input:
            self._wake()
        return self._num_unread > 0

    def _read_events(self) -> None:
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            except zmq.Again:
                break
            descriptor = int(event["value"])
            self._waiting.pop(descriptor, None)
            self._shut_down.discard(descriptor)
            if (connection := self._known.pop(descriptor, None)) is not None:
                self._ending.add(connection)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._waiting[descriptor] = _Connection(self._clock)
            elif event["event"] == zmq.EVENT_LISTENING and sys.platform == "linux":
                idle = socket.create_server(("127.0.0.1", 0))
                idle.setblocking(False)
                self._listening = descriptor, os.dup(descriptor), idle
                with open_files.insisting:
                    open_files.listeners.append(self._accepts_nothing)
        if self._ending:
            self._check_soon()

    @contextlib.contextmanager
    def _accepts_nothing(self) -> Iterator[None]:
        """Put a socket without connections in place of the listening one, so that ZeroMQ accepts
        nothing. The duplicate keeps the listening socket open, and registered with epoll."""
        assert self._listening is not None
        listening, own, idle = self._listening
        os.dup2(idle.fileno(), listening, inheritable=False)
        try:
            yield
        finally:
            os.dup2(own, listening, inheritable=False)

    def _most(self) -> int:
        """Return half of the descriptors that nothing else uses, within LEAST and MOST."""
        limit, used = open_files.soft_limit(), open_files.num_open()
        others = (limit if used is None else used) - len(self._waiting) - len(self._shut_down)
        return min(MOST, max(LEAST, (limit - others) // 2))

    def _to_close(self, count: int) -> list[int]:
        """Return up to `count` connections: the oldest of the address with the most connections.
        The next check closes those of the next address."""
        of_address: dict[str, list[int]] = {}
        for descriptor, connection in self._waiting.items():
            if self._clock - connection.since < PATIENCE_S:
                break
            connection.address = connection.address or self._address(descriptor)
            of_address.setdefault(connection.address, []).append(descriptor)
        return max(of_address.values(), key=len, default=[])[:count]

    def _address(self, descriptor: int) -> str:
        with contextlib.suppress(OSError), self._borrowed(descriptor) as sock:
            return str(sock.getpeername()[0])
        return "?"

    def _shut(self, descriptor: int) -> None:
        if self._waiting.pop(descriptor, None) is not None:
            self._shut_down.add(descriptor)
        with contextlib.suppress(OSError), self._borrowed(descriptor) as sock:
            sock.shutdown(socket.SHUT_RDWR)  # ZeroMQ then closes it

    @contextlib.contextmanager
    def _borrowed(self, descriptor: int) -> Iterator[socket.socket]:
        """Duplicate the descriptor of a connection, which ZeroMQ may close at any moment.

        Raises OSError if the descriptor is no connection of this router any more.
        """
        os.dup2(descriptor, self._spare, inheritable=False)
        try:
            sock = socket.socket(fileno=self._spare)
            try:
                if sock.getsockname()[1] != self._port:
                    raise OSError("not a connection of this router")
                yield sock
            finally:
                sock.detach()
        finally:
            os.dup2(self._null, self._spare, inheritable=False)
