"""Temporary folders that bear their process's id: what a killed process left behind is removed by
the next one.

Each is locked while in use, since an id alone does not tell: it may have been given to another
process by now, or belong to another container that shares the place. Must not know what lies in
them.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "lightrl-"
MAX_NAME = 40  # characters of the caller's that stand in a folder's


@contextlib.contextmanager
def temporary_folder(name: str, root: Path | None = None) -> Iterator[Path]:
    """A new folder in `root`, by default TMPDIR, for the caller alone; removed at the end."""
    root = root or Path(tempfile.gettempdir())
    remove_stale(root)
    path, lock = _new_folder(name, root)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _remove(path: Path) -> None:
    """Whatever a stranger's program has left there: folders that are too deep for `rmtree`, or that
    nobody may read."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.is_symlink():
        path.unlink(missing_ok=True)
    elif path.exists():
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)


def _new_folder(name: str, root: Path) -> tuple[Path, int]:
    """With the descriptor that holds its lock."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:MAX_NAME]
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{readable}-", dir=root))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)
        # somebody to whom our id says nothing took it for a stale one before it was locked


def remove_stale(root: Path) -> None:
    """Folders in `root` whose processes are gone. Nobody holds the lock of such a folder."""
    for path in root.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """If it is a directory of ours. Who waits for its lock meanwhile finds that it has gone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        finally:
            os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as e:
        return isinstance(e, PermissionError)
    return True
