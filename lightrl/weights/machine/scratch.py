"""Choose where a daemon stores weight files: in shared memory if there is room, else on the disk.

Owns that choice. `system/temporary.py` removes what dead processes left behind.
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

MIN_FREE_BYTES = 1 << 30  # of shared memory, where the size of a version is unknown
SPARE_BYTES = 64 << 20  # left for other programs
_MEMORY = Path("/proc/meminfo")
NUM_VERSIONS = 3  # in a folder at a time: the one that is served or loaded, its successor, a draft


@contextlib.contextmanager
def scratch_dir(name: str, need_bytes: int = 0) -> Iterator[Path]:
    """Create a folder for the caller alone and remove it at the end. `need_bytes`: size of one
    version."""
    for root in {_shared(), _disk()}:
        remove_stale(root)
    needed = needed_bytes(need_bytes) if need_bytes else MIN_FREE_BYTES
    root = roots()[0] if free_bytes(roots()[0]) >= needed else _disk()
    with temporary_folder(name, root) as path:
        yield path


@contextlib.asynccontextmanager
async def scratch_dir_in_thread(name: str, need_bytes: int = 0) -> AsyncIterator[Path]:
    """`scratch_dir` for an event loop: removing many gigabytes blocks."""
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
    """Shared memory, if this machine has any, and the disk."""
    return (_shared(), _disk()) if os.access(_shared(), os.W_OK) else (_disk(),)


def free_bytes(root: Path) -> int:
    """The bytes that can be written there. Shared memory may be declared larger than the memory
    that is left. Raises OSError."""
    free = shutil.disk_usage(root).free
    return min(free, available_memory()) if root == _shared() else free


def available_memory() -> int:
    """Bytes of this host's memory that processes may still take; sys.maxsize where the kernel does
    not report it."""
    with contextlib.suppress(OSError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return sys.maxsize


def needed_bytes(num_bytes: int, held: int = 0, begun: int = 0) -> int:
    """The bytes that must be free in shared memory for a version of this size: memory has room for
    all versions that a machine holds at a time, or is not used. `held`: bytes of versions that are
    there, `begun` of them of this one."""
    return max(NUM_VERSIONS * num_bytes - held, growing_bytes(num_bytes - begun))


def growing_bytes(num_bytes: int) -> int:
    """The bytes that must be free to write this many."""
    return num_bytes + SPARE_BYTES
