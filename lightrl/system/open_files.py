"""How many descriptors this process may have: raised when a daemon starts, a few of them set aside.

ZeroMQ accepts whoever connects as long as there is a descriptor, so the limit under which it does
stays a little below the real one: what is set aside serves files without which a run cannot go on.
Must not know which files those are.
"""

import contextlib
import errno
import os
import resource
import sys
import threading

SET_ASIDE = 8  # descriptors
MOST = 1 << 20  # where the system names no limit

_before: int | None = None  # the soft limit that this process was started with, once it is raised
_usual = 0  # the soft limit since then
_insisting = threading.Lock()  # held by who has changed it for a moment


def raise_limit() -> None:
    """Lets this process open as much as the system allows. To be called once, at its start."""
    global _before, _usual
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = raised_limit()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
        _before, _usual = soft, usual


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
    other. Raises OSError; EMFILE if those are taken, too, which will pass: while one of them is
    handed out, ZeroMQ may accept a stranger with another one, and keeps it until the handshake is
    due.
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
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            return os.open(path, flags, mode)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_open() -> int | None:
    """By this process; None if that cannot be counted now."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one for looking
    except OSError:
        return None


def soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
