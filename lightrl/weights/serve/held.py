"""One version that a weight server holds: its two open files, and how much of it may be sent.

Owns the files and their lock. A version that is still being pulled is served as far as it is
verified. Must not import torch; has no sockets.
"""

import asyncio
import fcntl
import os

from lightrl.errors import WeightsError
from lightrl.weights.serve.request import (
    ASK_DATA,
    ASK_HAVE,
    ASK_MANIFEST,
    ASK_SHARED,
    Holdings,
    Request,
)
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import VersionFile


class Held:
    """Holds the files of a version: closes them once they are retired and not in use. Lives in one
    event loop.

    The pull that fills a version calls `getting`, `verified` and `complete`.
    """

    def __init__(self, file: VersionFile, is_complete: bool) -> None:
        """Raises WeightsError if the file is missing, of another size or being overwritten."""
        self.policy_versions = {file.policy_version}
        self.size = file.num_bytes
        self.is_complete = is_complete
        self.retired: asyncio.Future[None] | None = None
        self.changed = asyncio.Event()  # replaced after each change
        self.holdings = Holdings(1, 0, 0)
        self._num_users = 0
        self.file, self.manifest_file = _open(file)
        self.manifest_size = os.fstat(self.manifest_file).st_size

    def has(self, request: Request) -> bool:
        """Return whether there is such a range, verified or not."""
        if request.what == ASK_HAVE:
            return request.size == self.size
        size = self.manifest_size if request.what == ASK_MANIFEST else self.size
        return request.offset <= size and request.size <= size - request.offset

    def can_send(self, request: Request) -> bool:
        """Return whether all of the range is verified."""
        if self.is_complete or request.what not in (ASK_DATA, ASK_SHARED) or not request.size:
            return True
        first = request.offset // BUCKET_BYTES
        last = (request.offset + request.size - 1) // BUCKET_BYTES
        mask = (1 << last - first + 1) - 1
        return self.holdings.verified >> first & mask == mask

    def descriptor(self, request: Request) -> int:
        assert request.what != ASK_HAVE
        return self.manifest_file if request.what == ASK_MANIFEST else self.file

    def getting(self, bucket: int) -> None:
        """A bucket was asked of a complete source: peers can wait for it here."""
        self._set(self.holdings.verified, self.holdings.getting | 1 << bucket)

    def verified(self, bucket: int) -> None:
        """A bucket is in the file, verified: it is served from now on."""
        bit = 1 << bucket
        self._set(self.holdings.verified | bit, self.holdings.getting & ~bit)

    def complete(self) -> None:
        """The version is complete; the file may be renamed, and is still served."""
        self.is_complete = True
        self._notify()

    def acquire(self) -> None:
        """Keep the files open until `release`."""
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        self._close_unused()

    def retire(self) -> asyncio.Future[None]:
        """Close the files when they are not in use; the future is done then."""
        if self.retired is None:
            self.retired = asyncio.get_running_loop().create_future()
            self._notify()
            self._close_unused()
        return self.retired

    def _set(self, verified: int, getting: int) -> None:
        self.holdings = Holdings(self.holdings.changes + 1, verified, getting)
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _close_unused(self) -> None:
        """In a thread: the last close of an unlinked file releases all its memory."""
        if self.retired is None or self._num_users or self.file < 0:
            return
        closing = asyncio.get_running_loop().run_in_executor(
            None, _close, self.file, self.manifest_file
        )
        self.file = self.manifest_file = -1
        retired = self.retired
        closing.add_done_callback(lambda _: retired.done() or retired.set_result(None))


def _open(file: VersionFile) -> tuple[int, int]:
    opened: list[int] = []
    try:
        opened.extend(os.open(path, os.O_RDONLY) for path in (file.path, file.manifest_path))
        fcntl.flock(opened[0], fcntl.LOCK_SH | fcntl.LOCK_NB)
        size = os.fstat(opened[0]).st_size
        if size != file.num_bytes:
            raise WeightsError(f"{file.path}: has {size} bytes, not {file.num_bytes}")
    except (OSError, WeightsError) as e:
        _close(*opened)
        if isinstance(e, BlockingIOError):
            raise WeightsError(f"{file.path}: is being overwritten") from e
        if isinstance(e, OSError):
            raise WeightsError(f"{e.filename or file.path}: cannot be served: {e.strerror}") from e
        raise
    return opened[0], opened[1]


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
