"""The collective of emulated ranks: each sends one line and receives those of all.

Over a socket in the folder that the daemon names, which only its user may enter.
"""

import contextlib
import socket
import time
from pathlib import Path
from typing import IO

LOOK_S = 0.01
MAX_LINE = 1 << 16


class Meeting:
    """Of the ranks that were started together. Raises RuntimeError where another one is gone."""

    def __init__(self, rank: int, world: int, place: Path) -> None:
        self._rank, self._world = rank, world
        self._others: list[IO[str]] = []  # for rank 0 all others in their order, for these rank 0
        if world == 1:
            return
        if rank == 0:
            self._others = _accept_all(place, world - 1)
        else:
            self._others = [_connect(place)]
            _send_line(self._others[0], str(rank))

    def exchange(self, text: str) -> list[str]:
        """The lines of all ranks, in their order; `text` is one line."""
        if not self._others:
            return [text]
        if self._rank > 0:
            [first] = self._others
            _send_line(first, text)
            return [_receive_line(first) for _ in range(self._world)]
        texts = [text, *map(_receive_line, self._others)]
        for other in self._others:
            _send_line(other, "\n".join(texts))
        return texts


def _send_line(other: IO[str], text: str) -> None:
    try:
        other.write(f"{text}\n")
        other.flush()
    except OSError as e:
        raise RuntimeError(f"another rank is gone: {e.strerror}") from None


def _receive_line(other: IO[str]) -> str:
    try:
        line = other.readline(MAX_LINE)
    except OSError as e:
        raise RuntimeError(f"another rank is gone: {e.strerror}") from None
    if not line.endswith("\n"):
        raise RuntimeError("another rank is gone")
    return line[:-1]


def _accept_all(place: Path, num_others: int) -> list[IO[str]]:
    by_rank: dict[int, IO[str]] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(place.parent):  # the path of a socket must be short
            listener.bind(place.name)
        listener.listen(num_others)
        while len(by_rank) < num_others:
            other = _lines(listener.accept()[0])
            by_rank[int(_receive_line(other))] = other
    return [by_rank[rank] for rank in sorted(by_rank)]


def _connect(place: Path) -> IO[str]:
    """Wait for rank 0 to listen; the daemon ends a rank that waits for a dead one."""
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.chdir(place.parent):
                sock.connect(place.name)
            return _lines(sock)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
        time.sleep(LOOK_S)


def _lines(sock: socket.socket) -> IO[str]:
    with sock:
        return sock.makefile("rw", encoding="utf-8", newline="\n")
