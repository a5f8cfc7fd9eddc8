"""Raise the limit of open files of a daemon, and reserve some descriptors for important files.

ZeroMQ accepts every connection while a descriptor is free, so the soft limit stays a little below
the hard one. `insist` opens a file that a run needs with one of the descriptors between the two.
"""

import contextlib
import errno
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator

RESERVED = 16  # descriptors
MOST = 1 << 20  # where the system has no limit

_before: int | None = None  # the soft limit before `raise_limit`
insisting = threading.Lock()  # held while the limit, or `listeners`, is changed
# Contexts in which a listening socket accepts no connection.
listeners: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


def raise_limit() -> None:
    """Raise the soft limit of this process, and reserve descriptors. Call once, at its start."""
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError), insisting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised_limit(), hard))
        _before = soft


def raised_limit() -> int:
    """Return the soft limit of a daemon: the hard limit without the reserve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    real = MOST if hard == resource.RLIM_INFINITY else hard
    return real - min(RESERVED, real // 8)


def restore_for(pid: int) -> None:
    """Give a child the original soft limit: user code may rely on it (select)."""
    if _before is not None and sys.platform == "linux":
        with contextlib.suppress(OSError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (_before, hard))


def insist(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """os.open, or an opener for open(), that uses the reserve if no other descriptor is free.
    Raises OSError; EMFILE if the reserve is used up."""
    try:
        return os.open(path, flags, mode)
    except OSError as e:
        if e.errno != errno.EMFILE or _before is None:
            raise
    with reserve():
        return os.open(path, flags, mode)


@contextlib.contextmanager
def reserve() -> Iterator[None]:
    """Use the reserve within the block. ZeroMQ accepts nothing meanwhile."""
    with insisting, contextlib.ExitStack() as paused:
        for accepts_nothing in listeners:
            paused.enter_context(accepts_nothing())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            _set_soft_limit(hard, hard)
            yield
        finally:
            _set_soft_limit(soft, hard)


def _set_soft_limit(soft: int, hard: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a hard limit beyond that of the system
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_open() -> int | None:
    """Return the number of open descriptors; None if it is unknown."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # for the listing itself
    except OSError:
        return None


def soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
