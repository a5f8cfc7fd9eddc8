"""Files that must still be there when a machine has lost its power: written and made durable, in
that order.

Owns which calls make a file, a name or a directory last. Knows nothing of what is in them.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from lightrl.system import open_files


def write_whole(path: Path, data: bytes) -> None:
    """`path` holds all of `data` and will go on to; until then it holds what it held before, if it
    was there.

    Raises OSError; the file then holds the one or the other, whole.
    """
    with replacing(path) as file:
        write_at(file, 0, data)


@contextlib.contextmanager
def replacing(path: Path, lasting: bool = True, keep_open: bool = False) -> Iterator[int]:
    """A file to be written, which becomes `path` where the block ends, and will stay it; if
    anything is raised before that, `path` is as it was.

    With `keep_open` the caller closes it, if all went well. Not `lasting`: who looks finds the one
    file or the other, whole, but after a loss of power perhaps neither.
    """
    draft = draft_of(path)
    file = open_files.insist(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        yield file
        if lasting:
            os.fsync(file)  # before the rename: else a name may come first, with nothing in it
        os.rename(draft, path)
        if lasting:
            sync(path.parent)
    except BaseException:
        os.close(file)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if not keep_open:
        os.close(file)


def draft_of(path: Path) -> Path:
    """Where `path` is written before it has its name; it stays there if the writer is killed."""
    return path.with_name(f".{path.name}.draft")


def write_at(file: int, offset: int, data: bytes | memoryview) -> int:
    """Writes all of it; returns where it ends. Raises OSError with a part written."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        offset += written
        rest = rest[written:]
    return offset


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
