"""One version that a weight server holds: its two open files, and how much of it may be sent.

Owns the files and their lock. A version that is still being pulled is served as far as it is
verified, and each change is logged for those who follow it. Must not import torch; has no
sockets.
"""

import asyncio
import fcntl
import os

from lightrl.errors import WeightsError
from lightrl.weights.serve.request import (
    ALL,
    ASK_DATA,
    ASK_HAVE,
    ASK_MANIFEST,
    ASK_SHARED,
    GETTING,
    RECORD,
    VERIFIED,
    Request,
    pack_bitmap,
)
from lightrl.weights.version.layout import BUCKET_BYTES, num_buckets
from lightrl.weights.version.manifest import VersionFile


class Held:
    """Lives in one event loop. The files are closed when they are retired and not in use."""

    def __init__(self, file: VersionFile, is_complete: bool) -> None:
        """Raises WeightsError if the file is missing, of another size or being overwritten."""
        self.policy_versions = {file.policy_version}
        self.size = file.num_bytes
        self.is_complete = is_complete
        self.retired: asyncio.Future[None] | None = None
        self._num_users = 0
        self._verified: set[int] = set()
        self._getting: set[int] = set()  # on their way here
        self._log = bytearray()  # records of what changed
        self._changed = asyncio.Event()  # replaced after each change
        self.file, self.manifest_file = _open(file)
        self.manifest_size = os.fstat(self.manifest_file).st_size

    def has(self, request: Request) -> bool:
        """Whether there is such a range, verified or not."""
        if request.what == ASK_HAVE:
            return request.size == self.size and request.offset == 0
        size = self.manifest_size if request.what == ASK_MANIFEST else self.size
        return request.offset <= size and request.size <= size - request.offset

    def can_send(self, request: Request) -> bool:
        """Whether all of the range is verified."""
        if self.is_complete or request.what not in (ASK_DATA, ASK_SHARED):
            return True
        if request.size == 0:
            return True
        last = (request.offset + request.size - 1) // BUCKET_BYTES
        return self._verified.issuperset(range(request.offset // BUCKET_BYTES, last + 1))

    def descriptor(self, request: Request) -> int:
        assert request.what != ASK_HAVE
        return self.manifest_file if request.what == ASK_MANIFEST else self.file

    def add(self, kind: bytes, bucket: int) -> None:
        """Note a change: VERIFIED, GETTING or, at the end, ALL."""
        if self.is_complete or not 0 <= bucket < num_buckets(self.size):
            return
        if kind == VERIFIED:
            self._verified.add(bucket)
            self._getting.discard(bucket)
        elif kind == GETTING:
            self._getting.add(bucket)
        self.is_complete = kind == ALL
        self._log += RECORD.pack(kind, bucket)
        self._changed.set()
        self._changed = asyncio.Event()

    def state(self) -> tuple[bytes, int]:
        """A bitmap of what is verified, records of what is on its way, and the position in the log
        from which `news` follow."""
        on_its_way = b"".join(RECORD.pack(GETTING, bucket) for bucket in sorted(self._getting))
        return pack_bitmap(self._verified, self.size) + on_its_way, len(self._log)

    def news(self, position: int) -> bytes:
        """The records of the log since `position`."""
        return bytes(self._log[position:])

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set at the next change."""
        return self._changed

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
            self._changed.set()
            self._close_unused()
        return self.retired

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


class Partial:
    """A version that is being pulled here, and served meanwhile. Methods may be called from any
    thread."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._loop = asyncio.get_running_loop()

    def getting(self, bucket: int) -> None:
        """A bucket was asked of a complete source: peers can wait for it here."""
        self._add(GETTING, bucket)

    def verified(self, bucket: int) -> None:
        """A bucket is in the file, verified: it is served from now on."""
        self._add(VERIFIED, bucket)

    def complete(self) -> None:
        """The version is complete; the file may be renamed, and is served all the same."""
        self._add(ALL, 0)

    def _add(self, kind: bytes, bucket: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._held.add, kind, bucket)
        except RuntimeError:  # the loop is closed
            return


def _open(file: VersionFile) -> tuple[int, int]:
    opened: list[int] = []
    try:
        opened.extend(os.open(path, os.O_RDONLY) for path in (file.path, file.manifest_path))
        fcntl.flock(opened[0], fcntl.LOCK_SH | fcntl.LOCK_NB)
        size = os.fstat(opened[0]).st_size
        if size != file.num_bytes:
            raise WeightsError(f"{file.path}: has {size} bytes, its manifest says {file.num_bytes}")
    except (OSError, WeightsError) as e:
        for descriptor in opened:
            os.close(descriptor)
        if isinstance(e, BlockingIOError):
            raise WeightsError(f"{file.path}: is being overwritten") from e
        if isinstance(e, OSError):
            raise WeightsError(f"{e.filename or file.path}: cannot be served: {e.strerror}") from e
        raise
    return opened[0], opened[1]


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
