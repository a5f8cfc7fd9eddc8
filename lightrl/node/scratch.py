"""Where a daemon keeps the weight files that travel: in shared memory where there is room for it.

A directory carries its daemon's pid; what a killed daemon left behind is removed by the next one.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "lightrl-"
MIN_FREE_BYTES = 1 << 30  # below that, shared memory is not used


@contextlib.contextmanager
def scratch_dir(name: str) -> Iterator[Path]:
    """A directory for this process alone, removed at the end."""
    root = _root()
    for path in root.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    path = root / f"{PREFIX}{os.getpid()}-{name}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _root() -> Path:
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= MIN_FREE_BYTES:
        return shared
    return Path(tempfile.gettempdir())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
