"""Raise the limit of open files of a daemon, and reserve some descriptors for important files.

ZeroMQ accepts every connection while a descriptor is free, so the soft limit stays a little below
the hard one. The descriptors between the two are reserved for files that a run needs: placeholders
hold them until `insist` replaces one, since ZeroMQ would take a free one first.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import sys
import threading
from collections.abc import Iterator

RESERVED = 16  # descriptors
MOST = 1 << 20  # where the system has no limit
# No placeholders above this limit: each would enlarge the table of descriptors, which every fork
# copies; and unauthenticated peers are closed before they fill a table of that size.
MOST_HELD = 1 << 16

_before: int | None = None  # the soft limit before `raise_limit`
_usual = 0  # the soft limit since then
_null = -1  # a descriptor of /dev/null
_held: list[int] = []  # placeholders: its copies, from _usual on
_insisting = threading.Lock()  # held while the limit is changed for a moment
_close = ctypes.PyDLL(None).close  # keeps the GIL, so that no other thread runs in between


def raise_limit() -> None:
    """Raise the soft limit of this process, and reserve descriptors. Call once, at its start."""
    global _before, _usual, _null
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = raised_limit()
    with contextlib.suppress(OSError, ValueError), _insisting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
        _before, _usual = soft, usual
        _null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        with _all_allowed(usual, hard):
            _hold(hard)


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

    Raises OSError; EMFILE if the reserve is used up. ZeroMQ may take a released placeholder first;
    then the next one is tried. The next call reserves such descriptors again once they are free.
    """
    try:
        return os.open(path, flags, mode)
    except OSError as e:
        if e.errno != errno.EMFILE:
            raise
    with _insisting:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != _usual or hard <= soft:
            return os.open(path, flags, mode)
        with _all_allowed(soft, hard):
            _hold(hard)
            while _held:
                _close(_held.pop())
                try:
                    return os.open(path, flags, mode)
                except OSError as e:
                    if e.errno != errno.EMFILE:
                        _hold(hard)
                        raise
            return os.open(path, flags, mode)


@contextlib.contextmanager
def _all_allowed(soft: int, hard: int) -> Iterator[None]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _hold(hard: int) -> None:
    """Fill all free descriptors of the reserve. Call while the soft limit is the hard one."""
    if hard <= MOST_HELD:
        with contextlib.suppress(OSError):  # all are used
            while True:
                _held.append(fcntl.fcntl(_null, fcntl.F_DUPFD_CLOEXEC, _usual))


def num_open() -> int | None:
    """Return the number of open descriptors without placeholders; None if it is unknown."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1 - len(_held)  # 1 for the listing itself
    except OSError:
        return None


def soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
