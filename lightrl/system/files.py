"""Write files durably: they survive a loss of power."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from lightrl.system import open_files


def write_whole(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`, atomically and durably.

    Raises OSError; the file then has the old content or the new one.
    """
    with replacing(path) as file:
        write_at(file, 0, data)


@contextlib.contextmanager
def replacing(path: Path, lasting: bool = True, keep_open: bool = False) -> Iterator[int]:
    """Yield a file that replaces `path` at the end of the block, atomically and durably.

    If the block raises, `path` is unchanged. With `keep_open` the caller closes the file on
    success. Without `lasting`, a loss of power may leave neither the old file nor the new one.
    """
    draft = draft_of(path)
    file = open_files.insist(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        yield file
        if lasting:
            os.fsync(file)  # before the rename: else an empty file may get the name
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
    """Return the temporary name of `path`; a killed writer leaves it behind."""
    return path.with_name(f".{path.name}.draft")


def write_at(file: int, offset: int, data: bytes | memoryview) -> int:
    """Write all of `data` and return the end offset. Raises OSError with a part written."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        offset += written
        rest = rest[written:]
    return offset


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably. Raises OSError."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:  # created meanwhile, or no directory
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable. Raises OSError."""
    descriptor = open_files.insist(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
