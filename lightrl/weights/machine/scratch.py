"""Where a daemon keeps the weight files that travel: in shared memory where there is room for it.

A directory carries its daemon's pid and is locked while in use; what a killed daemon left behind is
removed by the next one.
"""

import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from lightrl.system.threads import in_thread

PREFIX = "lightrl-"
MIN_FREE_BYTES = 1 << 30  # of shared memory, or it is not used, where no size is known
SPARE_BYTES = 64 << 20  # left for others
_MEMORY = Path("/proc/meminfo")
NUM_VERSIONS = 3  # in a directory at once: the one that is served or loaded, its successor, a draft


@contextlib.contextmanager
def scratch_dir(name: str, need_bytes: int = 0) -> Iterator[Path]:
    """A new directory for the caller alone, removed at the end. `need_bytes`: size of one
    version."""
    for root in {_shared(), _disk()}:
        _remove_stale(root)
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:40]
    path = Path(
        tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{readable}-", dir=_root(need_bytes))
    )
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextlib.asynccontextmanager
async def scratch_dir_in_thread(name: str, need_bytes: int = 0) -> AsyncIterator[Path]:
    """As `scratch_dir`, for an event loop: what is removed may be many gigabytes."""
    folder = scratch_dir(name, need_bytes)
    path = await in_thread(folder.__enter__)
    try:
        yield path
    finally:
        await in_thread(folder.__exit__, None, None, None)


def _shared() -> Path:
    return Path("/dev/shm")


def _disk() -> Path:
    return Path(tempfile.gettempdir())


def roots() -> tuple[Path, ...]:
    """Where files may lie: shared memory, if there is any, and the disk."""
    return (_shared(), _disk()) if os.access(_shared(), os.W_OK) else (_disk(),)


def free_bytes(root: Path) -> int:
    """That can be written there. Shared memory may be said to be larger than what is left of the
    memory. Raises OSError."""
    free = shutil.disk_usage(root).free
    return min(free, available_memory()) if root == _shared() else free


def available_memory() -> int:
    """Bytes of this host's memory that processes may still take; as much as there can be where that
    is not known."""
    with contextlib.suppress(OSError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return sys.maxsize


def needed_bytes(num_bytes: int, held: int = 0, begun: int = 0) -> int:
    """That must be free in shared memory for a version of this size to lie there: all that a
    machine may hold at a time must have room, or none of it. `held`: bytes of versions that are
    there, `begun` of them of this one."""
    return max(NUM_VERSIONS * num_bytes - held, growing_bytes(num_bytes - begun))


def growing_bytes(num_bytes: int) -> int:
    """That must be free wherever a version, or the rest of one, is to be written."""
    return num_bytes + SPARE_BYTES


def _root(need_bytes: int) -> Path:
    needed = needed_bytes(need_bytes) if need_bytes else MIN_FREE_BYTES
    return roots()[0] if free_bytes(roots()[0]) >= needed else _disk()


def _remove_stale(root: Path) -> None:
    """A pid alone does not tell: it may be used again, by this very process, or belong to another
    container that shares this directory. Nobody holds the lock of a dead daemon's directory."""
    for path in root.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if (
            pid.isdigit()
            and (int(pid) == os.getpid() or not _is_alive(int(pid)))
            and not _is_locked(path)
        ):
            shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True  # gone, or not a directory of ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
