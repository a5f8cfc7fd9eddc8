"""Files of a set that are read at any place, with no more descriptors than a stated number.

Owns which of them stay open: those that were read last. As long as a set has fewer files than that,
each is opened once. Whoever reads may have to wait until there is a descriptor, so it is not to be
an event loop: those that are set aside for the journal are not used up for data.
"""

import errno
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import IO

MOST = 32  # of a set
PATIENCE_S = 60.0  # for a descriptor: strangers who hold the last ones are cut off within seconds
PAUSE_S = 0.05


class OpenFiles:
    """For one thread at a time."""

    def __init__(self, most: int = MOST, rest: Callable[[float], object] = time.sleep) -> None:
        """`rest`: for some seconds, until there may be a descriptor again."""
        self._most = most
        self._rest = rest
        self._descriptors: OrderedDict[Path, int] = OrderedDict()  # the one read last is last
        self._opened: dict[Path, tuple[int, int]] = {}  # device and inode, at the first time

    def __len__(self) -> int:
        return len(self._descriptors)

    def __del__(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        if "spool" in self.__dict__:
            self.spool.close()

    @cached_property
    def spool(self) -> IO[bytes]:
        """A temporary file without a name, for rows that no file has as they are. Raises OSError if
        there is no room."""
        return tempfile.TemporaryFile()

    def descriptor(self, file: Path) -> int:
        """Good until the next call; not to be closed. Raises OSError, also for another file that
        lies now where this one was."""
        known = self._descriptors.get(file)
        if known is None:
            if len(self._descriptors) >= self._most:
                os.close(self._descriptors.popitem(last=False)[1])
            known = self._open(file)
            status = os.fstat(known)
            own = status.st_dev, status.st_ino
            if self._opened.setdefault(file, own) != own:
                os.close(known)
                raise OSError(errno.ESTALE, "another file lies there since it was opened first")
            self._descriptors[file] = known
        self._descriptors.move_to_end(file)
        return known

    def _open(self, file: Path) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as e:
                if e.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > deadline:
                    raise
            self._rest(PAUSE_S)
