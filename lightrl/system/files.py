"""Files that must still be there when a machine has lost its power: written and made durable, in
that order.

Owns which calls make a file, a name or a directory last. Knows nothing of what is in them.
"""

import contextlib
import errno
import os
from pathlib import Path

from lightrl.system import open_files


def write_whole(path: Path, data: bytes) -> None:
    """`path` holds all of `data` and will go on to; until then it holds what it held before, if it
    was there.

    Raises OSError; the file then holds the one or the other, whole.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb", buffering=0, opener=open_files.insist) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            # before the rename: else a name may come first, with nothing in the file
            os.fsync(file.fileno())
        os.rename(draft, path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """With all above it that are missing; each of them lasts. Raises OSError."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:  # another one was quicker, or it is no directory
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync(path.parent)


def sync(path: Path) -> None:
    """What is in a file, or the names in a directory, will last. Raises OSError."""
    descriptor = open_files.insist(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
