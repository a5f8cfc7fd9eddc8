"""A file that only grows, by whole pieces, and that a run can do without.

Owns what happens when the disk refuses: the piece is left out, which is said once. For what must
not be lost there is the journal.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from lightrl.system import open_files


class AppendFile:
    """Opened when it is first written to, and tried again each time if that fails."""

    def __init__(self, path: Path, report: Callable[[str], None], separator: bytes = b"") -> None:
        """`separator`: what is put after a piece that a crash has torn, whose last byte is another
        one."""
        self._path = path
        self._report = report
        self._separator = separator
        self._file: int | None = None
        self._num_lost = 0

    def append(self, piece: bytes) -> bool:
        """Whether it is in the file now: all of it, or nothing."""
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
            if os.write(self._file, piece) < len(piece):  # in one write: a reader sees whole pieces
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise
