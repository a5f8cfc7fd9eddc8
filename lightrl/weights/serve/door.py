"""The door of the weight server: accepts connections and keeps each until it has made its first
request.

Whoever comes gets little: GREETING_S, and one of a few places. Where there is no place for one who
comes, one who is there goes, so that any number of silent peers that always come back keep nobody
out. Owns the listener and the connections without a request; who is let in is not decided here.
Callbacks of the event loop, which never wait.
"""

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from lightrl.errors import ProtocolError
from lightrl.weights.serve.request import Request, num_missing, unpack

GREETING_S = 2.0  # from the connection to a whole request
FEW_PLACES = 8  # of one address: who has more must make room first
ACCEPTS_AT_ONCE = 64  # before other callbacks get their turn
PAUSE_S = 0.01  # when nothing can be accepted, for want of descriptors

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection without a request so far."""

    sock: socket.socket
    address: bytes
    since: float
    data: bytearray = field(default_factory=bytearray)


class Door:
    """`open` for each listener, `close` at the end."""

    def __init__(self, places: int, show: Callable[[socket.socket, Request], None]) -> None:
        """`show` is given the connections that have made a request, and owns them from then on."""
        self._places = places
        self._show = show
        self._listeners: list[socket.socket] = []
        self._callers: dict[_Caller, None] = {}  # in the order in which they came
        self._by_address: dict[bytes, dict[_Caller, None]] = {}  # likewise
        self._sweep: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def open(self, listener: socket.socket) -> None:
        """One more, for each address that is listened on."""
        self._listeners.append(listener)
        self._listen(listener)

    def close(self) -> None:
        """Nobody comes in any more; those who wait are cut off."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        if self._sweep is not None:
            self._sweep.cancel()
        for caller in list(self._callers):
            self._cut_off(caller)

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as e:  # the peer has gone already, or no descriptor is free
                if e.errno in (errno.EMFILE, errno.ENFILE) and self._callers:
                    self._cut_off(next(iter(self._callers)))
                    continue
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_S, self._listen, listener)
                return
            self._receive_from(sock, _counted_as(sock.family, address[0]))

    def _receive_from(self, sock: socket.socket, address: bytes) -> None:
        sock.setblocking(False)
        if len(self._callers) >= self._places:
            self._make_room(address)
        caller = _Caller(sock, address, self._loop.time())
        self._callers[caller] = None
        self._by_address.setdefault(address, {})[caller] = None
        self._loop.add_reader(sock, self._read, caller)
        if self._sweep is None:
            self._sweep = self._loop.call_later(GREETING_S, self._cut_off_the_silent)

    def _make_room(self, address: bytes) -> None:
        """The oldest caller goes: of the address of the new one, if that has more than a few; of
        the address that has most, if those are more than a few; of all.

        It may have made its request just now, and then has no place here any more either.
        """
        theirs = self._by_address.get(address, {})
        if len(theirs) < FEW_PLACES:
            theirs = max(self._by_address.values(), key=len)
        oldest = next(iter(theirs if len(theirs) >= FEW_PLACES else self._callers))
        self._read(oldest)
        if oldest in self._callers:
            self._cut_off(oldest)

    def _read(self, caller: _Caller) -> None:
        try:
            while missing := num_missing(caller.data):
                part = caller.sock.recv(missing)
                if not part:
                    break
                caller.data += part
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            missing = 1
        self._forget(caller)
        if missing:
            caller.sock.close()
        else:
            self._show(caller.sock, unpack(bytes(caller.data)))

    def _cut_off_the_silent(self) -> None:
        now = self._loop.time()
        while (oldest := next(iter(self._callers), None)) is not None:
            if (left_s := oldest.since + GREETING_S - now) > 0:
                self._sweep = self._loop.call_later(left_s, self._cut_off_the_silent)
                return
            self._cut_off(oldest)
        self._sweep = None

    def _cut_off(self, caller: _Caller) -> None:
        """By a reset: an orderly end would say that what was asked for is refused."""
        self._forget(caller)
        with contextlib.suppress(OSError):
            caller.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        caller.sock.close()

    def _forget(self, caller: _Caller) -> None:
        self._loop.remove_reader(caller.sock)
        del self._callers[caller]
        theirs = self._by_address[caller.address]
        del theirs[caller]
        if not theirs:
            del self._by_address[caller.address]


def _counted_as(family: int, host: str) -> bytes:
    """What counts as one address: in IPv6 a network of 64 bits, as one machine has all of it."""
    if family != socket.AF_INET6:
        return socket.inet_pton(socket.AF_INET, host)
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    is_ipv4 = packed.startswith(bytes(10) + b"\xff\xff")
    return packed if is_ipv4 else packed[:8]
