"""Where a daemon keeps the weight files that travel: in shared memory where there is room for it.

Owns which of the two it is. That nothing stays behind is `system/temporary.py`'s.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from lightrl.system.temporary import remove_stale, temporary_folder
from lightrl.system.threads import in_thread

MIN_FREE_BYTES = 1 << 30  # of shared memory, or it is not used, where no size is known
SPARE_BYTES = 64 << 20  # left for others
_MEMORY = Path("/proc/meminfo")
NUM_VERSIONS = 3  # in a directory at once: the one that is served or loaded, its successor, a draft


@contextlib.contextmanager
def scratch_dir(name: str, need_bytes: int = 0) -> Iterator[Path]:
    """A new directory for the caller alone, removed at the end. `need_bytes`: size of one
    version."""
    for root in {_shared(), _disk()}:
        remove_stale(root)
    with temporary_folder(name, _root(need_bytes)) as path:
        yield path


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
