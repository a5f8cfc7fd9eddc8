"""Append whole pieces to an optional file, and read such files of JSON lines.

A piece that cannot be written is dropped, with one line. The journal holds what must not be lost.
Lines of another form are skipped, such as the torn last line of a killed process.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from lightrl.errors import ProtocolError
from lightrl.system import open_files
from lightrl.wire import from_json

T = TypeVar("T")


class AppendFile:
    """Opens the file at the first append, and tries again at the next one if that fails."""

    def __init__(self, path: Path, report: Callable[[str], None], separator: bytes = b"") -> None:
        """`separator`: written after a piece torn by a crash, which does not end with it."""
        self._path = path
        self._report = report
        self._separator = separator
        self._file: int | None = None
        self._num_lost = 0

    def append(self, piece: bytes) -> bool:
        """Append a piece as a whole; return whether it was written."""
        try:
            self._append(piece)
        except OSError as e:
            self._num_lost += 1
            if self._num_lost == 1:
                why = e.strerror or str(e)
                self._report(
                    f"WARNING: {self._path.name}: cannot write ({why}); skipping records "
                    "until it can"
                )
            return False
        if self._num_lost:
            self._report(f"{self._path.name}: written again; {self._num_lost} records are missing")
        self._num_lost = 0
        return True

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _append(self, piece: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = open_files.insist(self._path, flags, 0o644)
        end = os.fstat(self._file).st_size
        n = len(self._separator)
        if n and end and os.pread(self._file, n, max(0, end - n)) != self._separator:
            piece = self._separator + piece
        try:
            if os.write(self._file, piece) < len(piece):  # one write: readers see whole pieces
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise


def read_rows(file: Path, kind: type[T]) -> Iterator[T]:
    """Yield the rows of type `kind` in order; none if there is no such file. Raises OSError."""
    return (row for _, row in read_ends(file, kind))


def read_ends(file: Path, kind: type[T], end: int = 0) -> Iterator[tuple[int, T]]:
    """Yield (end of the line, row) behind the first `end` bytes, as `read_rows` does."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
        opened.seek(end)
        for line in opened:
            end += len(line)
            with contextlib.suppress(ProtocolError):
                yield end, from_json(line, kind)
