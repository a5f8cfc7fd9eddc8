"""The connections of one pull on which nothing is owed: kept for the next request to their source.

Must not import torch. Methods may be called from any thread.
"""

import contextlib
import socket
import struct
import threading

from lightrl.errors import WeightsError
from lightrl.system.addresses import split_known
from lightrl.weights.pull.swarm import Source

CONNECT_LIMIT_S = 3.0
TICK_S = 0.25  # a thread that receives looks up so often
_TICK = struct.pack("ll", 0, int(TICK_S * 1e6))  # struct timeval


def parse_address(address: str) -> tuple[str, int]:
    """Of a holder. Raises WeightsError for one that nobody could connect to."""
    if (found := split_known(address)) is None:
        raise WeightsError(f"{address[:80]!r}: a holder looks like host:port")
    return found


class Connections:
    def __init__(self, timeout_s: float) -> None:
        self._limit_s = min(CONNECT_LIMIT_S, timeout_s)
        self._lock = threading.Lock()
        self._idle: dict[Source, list[socket.socket]] = {}
        self._is_closed = False

    def connect(self, source: Source) -> socket.socket:
        """Raises OSError."""
        addresses = source.addresses  # several network cards: streams share them
        address = addresses[source.num_streams % len(addresses)]
        sock = socket.create_connection(address, self._limit_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
        return sock

    def keep(self, source: Source, sock: socket.socket) -> None:
        """A connection on which nothing is owed; blocking from now on."""
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        with self._lock:
            if not self._is_closed:
                self._idle.setdefault(source, []).append(sock)
                return
        sock.close()

    def take(self, source: Source) -> socket.socket | None:
        """One that was kept."""
        with self._lock:
            idle = self._idle.get(source)
            return idle.pop() if idle else None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for sockets in self._idle.values():
                for sock in sockets:
                    sock.close()
            self._idle.clear()


def shut(sock: socket.socket | None) -> None:
    """Wakes the thread that waits for it."""
    if sock is not None:
        with contextlib.suppress(OSError):  # not connected any more
            sock.shutdown(socket.SHUT_RDWR)
