"""Temporary folders named by process id; those of killed processes are removed by the next one.

A folder is locked while in use: its process id alone does not show that, since ids are reused, and
other containers may share the place.
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

from lightrl.system import open_files

PREFIX = "lightrl-"
MAX_NAME = 40  # characters of the caller's name in the name of a folder


@contextlib.contextmanager
def temporary_folder(name: str, root: Path | None = None) -> Iterator[Path]:
    """Create a private folder in `root`, by default TMPDIR, and remove it at the end."""
    root = root or Path(tempfile.gettempdir())
    remove_stale(root)
    path, lock = _new_folder(name, root)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove a folder, even if a program has left folders too deep for `rmtree` or unreadable."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.is_symlink():
        path.unlink(missing_ok=True)
    elif path.exists():
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            with open_files.reserve():
                child = subprocess.Popen([*command, "--", path], stderr=subprocess.DEVNULL)
            child.wait()


def _new_folder(name: str, root: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:MAX_NAME]
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{readable}-", dir=root))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)
        # a process of another container removed it as stale before it was locked


def remove_stale(root: Path) -> None:
    """Remove folders in `root` whose processes have ended and whose locks are free."""
    for path in root.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a directory if its lock is free."""
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
