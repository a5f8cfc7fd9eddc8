"""Whether this process may still open something: without that, ZeroMQ lets nobody in and says nothing."""

import errno
import os
from collections.abc import Callable


class Descriptors:
    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._are_out = False

    def look(self) -> None:
        """Reports it when they have run out, and when there are some again. To be called now and then."""
        were_out, self._are_out = self._are_out, _are_out()
        if self._are_out and not were_out:
            self._report("WARNING: no free file descriptors: nobody can connect until there are some")
        elif were_out and not self._are_out:
            self._report("there are free file descriptors again")


def _are_out() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno in (errno.EMFILE, errno.ENFILE)
    return False
