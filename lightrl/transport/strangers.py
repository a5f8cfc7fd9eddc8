"""Connections to the router that have not proved yet that they have a key: how many there may be.

ZeroMQ accepts whoever connects, and keeps a descriptor and a frame's worth of memory for each until
its handshake ends or has taken too long. Whoever is one too many has its connection shut: the
oldest one, which an honest peer's never is for long, of the address that has most of them. Must not
look at what is said.

A stranger has become none when a message of its connection has arrived: what comes that far is
authenticated.
"""

import asyncio
import contextlib
import heapq
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightrl.system import open_files

MOST = 1024  # at once: 80 MiB, if each sends all it may
LEAST = 8  # however few descriptors there are
LOOK_S = 0.02  # connections that come within it are looked at together
PATIENCE_S = 0.25  # nobody goes before: so long an honest peer may take on a busy machine
# of it passes between two looks: in a turn that took longer, nobody was heard
MAX_TURN_S = 2 * LOOK_S
# looks at which nobody goes because messages wait to be read: theirs may be among them
MAX_UNREAD = 10


@dataclass(slots=True)
class _Stranger:
    # by the clock that stands still while this loop is busy
    since: float
    # not asked for yet
    address: str = ""


class Strangers:
    def __init__(self, sock: "zmq.Socket[bytes]", name: str, wake: Callable[[], None]) -> None:
        """Watches the connections of `sock`, before it listens; `name` is unique in this process.

        `wake` is called when something is added to `gone`, or messages wait: looking for them has
        taken the sign of it off the socket's descriptor.
        """
        # connections that have ended, and all their messages have arrived
        self.gone: set[int] = set()
        self._sock = sock
        self._wake = wake
        self._ending: set[int] = set()
        self._waiting: dict[int, _Stranger] = {}  # by descriptor, oldest first
        # descriptor -> connection, of those that are strangers no more
        self._known: dict[int, int] = {}
        self._num_known = 0
        self._port = 0
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # for a look at a connection, when there is no other descriptor
        self._spare = os.dup(self._null)
        self._loop = asyncio.get_running_loop()
        self._next_look: asyncio.TimerHandle | None = None
        self._looked_at = self._loop.time()
        self._num_unread = 0  # looks in a row
        self._clock = 0.0  # how long this loop has turned while there was something to look at
        self._monitor: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)  # else ZeroMQ's thread would wait for this one
        sock.monitor(f"inproc://strangers-{name}", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor.connect(f"inproc://strangers-{name}")
        self._fd = self._monitor.fileno()
        self._loop.add_reader(self._fd, self._look_soon)

    def listens_on(self, port: int) -> None:
        self._port = port
        self._look_soon()

    def __len__(self) -> int:
        return len(self._waiting)

    def count(self) -> tuple[int, int]:
        """Connections that are strangers no more, and those that are, by now."""
        self._read_events()
        return len(self._known), len(self._waiting)

    def spoke(self, descriptor: int) -> int:
        """A message has come through this connection; returns its number, which no other one ever
        has."""
        if descriptor not in self._known:
            self._read_events()  # how it was accepted may not have been read yet
            self._waiting.pop(descriptor, None)
            self._num_known += 1
            self._known[descriptor] = self._num_known
        return self._known[descriptor]

    def end(self, connection: int) -> None:
        """Shuts a connection through which messages came, if it still stands."""
        self._read_events()  # its descriptor may be another's by now
        for descriptor in [d for d, known in self._known.items() if known == connection]:
            self._shut(descriptor)
        self._look_soon()

    def close(self) -> None:
        """Before the socket itself is closed."""
        self._loop.remove_reader(self._fd)
        if self._next_look is not None:
            self._next_look.cancel()
        self._sock.disable_monitor()
        self._monitor.close(linger=0)
        os.close(self._spare)
        os.close(self._null)

    def _look_soon(self) -> None:
        if self._next_look is None:
            self._next_look = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        now = self._loop.time()
        self._clock += min(now - self._looked_at, MAX_TURN_S)
        self._looked_at = now
        # ZeroMQ tells of an end before it hands on what came last: so this is believed one look
        # later.
        if self._ending:
            self.gone |= self._ending
            self._ending = set()
            self._wake()
        self._read_events()
        surplus = len(self._waiting) - self._most() if len(self._waiting) > LEAST else 0
        if surplus > 0:
            if not self._may_be_read_soon():
                for descriptor in list(self._greediest(surplus)):
                    self._shut(descriptor)
            self._look_soon()

    def _may_be_read_soon(self) -> bool:
        """Whether messages wait: who has sent one of them is no stranger."""
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
            if (connection := self._known.pop(descriptor, None)) is not None:
                self._ending.add(connection)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._waiting[descriptor] = _Stranger(self._clock)
        if self._ending:
            self._look_soon()

    def _most(self) -> int:
        """Half of the descriptors that are not needed for anything else."""
        limit, used = open_files.soft_limit(), open_files.num_open()
        others = limit - len(self._waiting) if used is None else used - len(self._waiting)
        return min(MOST, max(LEAST, (limit - others) // 2))

    def _greediest(self, count: int) -> Iterator[int]:
        """The oldest connections of whoever has most, but none that has just come; up to
        `count`."""
        of_address: dict[str, list[int]] = {}
        for descriptor, stranger in self._waiting.items():
            if self._clock - stranger.since < PATIENCE_S:
                break
            stranger.address = stranger.address or self._address(descriptor)
            of_address.setdefault(stranger.address, []).append(descriptor)
        queue = [(-len(fds), address, iter(fds)) for address, fds in sorted(of_address.items())]
        heapq.heapify(queue)
        while queue and count > 0:
            size, address, descriptors = heapq.heappop(queue)
            yield next(descriptors)
            count -= 1
            if size < -1:
                heapq.heappush(queue, (size + 1, address, descriptors))

    def _address(self, descriptor: int) -> str:
        with contextlib.suppress(OSError), self._borrowed(descriptor) as sock:
            return str(sock.getpeername()[0])
        return "?"

    def _shut(self, descriptor: int) -> None:
        self._waiting.pop(descriptor, None)
        with contextlib.suppress(OSError), self._borrowed(descriptor) as sock:
            sock.shutdown(socket.SHUT_RDWR)  # ZeroMQ then closes it

    @contextlib.contextmanager
    def _borrowed(self, descriptor: int) -> Iterator[socket.socket]:
        """The connection under a descriptor of our own: ZeroMQ may close its own at any moment, and
        the kernel give the number to another file. Raises OSError if that is none of our
        connections."""
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
