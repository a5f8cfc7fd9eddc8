"""Connections of a puller to its sources: made when they are needed, kept while nothing is owed on
them.

Owns those that are kept. Used by threads: blocking, with a limit after which a thread looks up.
Must not import torch.
"""

import socket
import struct
import threading

from lightrl.weights.swarm import Source

CONNECT_LIMIT_S = 3.0
TICK_S = 0.25  # a thread looks up so often

_TICK = struct.pack("ll", 0, int(TICK_S * 1e6))  # struct timeval


class Connections:
    """Its methods may be called from any thread."""

    def __init__(self, connect_limit_s: float) -> None:
        self._connect_limit_s = connect_limit_s
        self._idle: dict[Source, list[socket.socket]] = {}
        self._lock = threading.Lock()

    def keep(self, source: Source, sock: socket.socket) -> None:
        """One on which nothing is owed; blocking from now on."""
        sock.setblocking(True)
        _set_limits(sock)
        with self._lock:
            self._idle.setdefault(source, []).append(sock)

    def take(self, source: Source) -> socket.socket | None:
        """One that was kept."""
        with self._lock:
            idle = self._idle.get(source)
            return idle.pop() if idle else None

    def connect(self, source: Source) -> socket.socket:
        """A new one. Raises OSError."""
        addresses = source.addresses  # several network cards: streams share them
        address = addresses[source.num_streams % len(addresses)]
        sock = socket.create_connection(address, self._connect_limit_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        _set_limits(sock)
        return sock

    def close(self) -> None:
        """When nobody keeps any more."""
        with self._lock:
            for sockets in self._idle.values():
                for sock in sockets:
                    sock.close()
            self._idle.clear()


def _set_limits(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
