"""How many descriptors this process may have: raised when a daemon starts, a few of them set aside.

ZeroMQ accepts whoever connects as long as there is a descriptor, so the limit under which it does
stays a little below the real one. What lies between the two is for files without which a run cannot
go on, and is held until one of them takes the place: ZeroMQ does not stop trying, and would have
all that is free before a file is opened. Must not know which files those are.
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

SET_ASIDE = 16  # descriptors
MOST = 1 << 20  # where the system names no limit
# None are held above it, since each makes the table as large, which every fork copies; it takes
# strangers too long to fill one of that size, before they are shut.
MOST_HELD = 1 << 16

_before: int | None = None  # the soft limit that this process was started with, once it is raised
_usual = 0  # the soft limit since then
_null = -1  # a descriptor of /dev/null
_held: list[int] = []  # copies of it, from _usual on
_insisting = threading.Lock()  # held by who has changed the limit for a moment
_close = ctypes.PyDLL(None).close  # without a pause in which another thread runs


def raise_limit() -> None:
    """Lets this process open as much as the system allows. To be called once, at its start."""
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
    """What a daemon may open, without what is set aside."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    real = MOST if hard == resource.RLIM_INFINITY else hard
    return real - min(SET_ASIDE, real // 8)


def restore_for(pid: int) -> None:
    """A child gets the limit that this process was started with: others' code may count on it
    (select)."""
    if _before is not None and sys.platform == "linux":
        with contextlib.suppress(OSError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (_before, hard))


def insist(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """os.open, or an opener for open(): with a descriptor of those set aside if there is no
    other. Raises OSError; EMFILE if those are taken, too.

    ZeroMQ may be quicker than the file that is to take the place of one; then it is the turn of the
    next one. What it got is free again when that stranger is shut, and is held again by the next
    call.
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
    """All of those set aside that are free; while the real limit is the limit."""
    if hard <= MOST_HELD:
        with contextlib.suppress(OSError):  # there are no more
            while True:
                _held.append(fcntl.fcntl(_null, fcntl.F_DUPFD_CLOEXEC, _usual))


def num_open() -> int | None:
    """By this process, without those held; None if that cannot be counted now."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1 - len(_held)  # and the one for looking
    except OSError:
        return None


def soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
