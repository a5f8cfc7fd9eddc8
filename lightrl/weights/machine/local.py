"""Files of versions on this machine, whole or partial: opened, locked, verified by bucket.

All of it blocks: call it in threads. A `LocalVersion` is closed in a thread, too: the last close of
a file releases its pages, which takes 0.15 s for each GB. Must not import torch.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from lightrl.errors import WeightsError
from lightrl.weights.version.layout import BUCKET_BYTES, bucket_range
from lightrl.weights.version.manifest import Manifest, VersionFile, read_manifest

HASH_THREADS = min(4, os.cpu_count() or 1)
CHUNK_BYTES = 1 << 20  # stays in a core's cache between reading and hashing


@dataclass(slots=True)
class LocalVersion:
    """A version's file, open and locked (shared): no process overwrites it until `close`."""

    file: VersionFile
    descriptor: int

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def open_version(file: VersionFile) -> LocalVersion | None:
    """Open and lock a version. Return None if there is no file of its size, or a process writes to
    it."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        # A file has its name only as long as it is that version.
        if found.st_size == file.num_bytes and os.path.samestat(found, os.stat(file.path)):
            return LocalVersion(file, descriptor)
    os.close(descriptor)
    return None


def close_version(version: LocalVersion | None) -> None:
    if version is not None:
        version.close()


def verify_version(version: LocalVersion, is_ended: threading.Event) -> None:
    """Hash all of a version, at the speed of memory. Raises WeightsError if a bucket is wrong or
    `is_ended` is set."""
    manifest = read_manifest(version.file)
    if manifest.num_bytes != version.file.num_bytes:
        raise WeightsError(f"{version.file.path}: not of the size in its manifest")
    buckets = range(manifest.num_buckets)
    right = verify_buckets(version.descriptor, manifest, buckets, lambda: not is_ended.is_set())
    if is_ended.is_set():
        raise WeightsError("the version is not wanted any more")
    if wrong := set(buckets) - right:
        raise WeightsError(f"{version.file.path}: bucket {min(wrong)}: digest differs")


def verify_buckets(
    file: int, manifest: Manifest, buckets: Sequence[int], goes_on: Callable[[], bool]
) -> set[int]:
    """Return which of these buckets of a file match their digests in the manifest. Uses several
    threads; returns early when `goes_on` returns False."""
    num = max(1, min(HASH_THREADS, len(buckets)))

    def verify_share(first: int) -> set[int]:
        buffer, right = memoryview(bytearray(CHUNK_BYTES)), set[int]()
        for bucket in buckets[first::num]:
            if not goes_on():
                break
            if _is_right(file, bucket, manifest, buffer):
                right.add(bucket)
        return right

    with ThreadPoolExecutor(num, thread_name_prefix="weights-verify") as threads:
        return set[int]().union(*threads.map(verify_share, range(num)))


def _is_right(file: int, bucket: int, manifest: Manifest, buffer: memoryview) -> bool:
    position, end = bucket_range(bucket, manifest.num_bytes)
    digest = blake3()
    while position < end:
        n = os.preadv(file, [buffer[: end - position]], position)
        if n == 0:
            return False
        digest.update(buffer[:n])
        position += n
    return digest.digest() == manifest.digest_of(bucket)


# Partial downloads


def partial_path(path: Path) -> Path:
    """The file in which a version grows before it is complete at `path`. A download that was cut
    short, by any process, is resumed from it."""
    return path.with_name(path.name + ".part")


def allocated_bytes(path: Path) -> int:
    """The bytes that a file takes on its disk; 0 for one that does not exist."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def open_partial(path: Path, size: int) -> tuple[int, list[int]]:
    """Open or create a partial download of a file of `size` bytes. Returns the descriptor and the
    buckets of which something was written. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, size)
        written, position = list[int](), 0
        with contextlib.suppress(OSError):  # only a hole follows
            while position < size:
                written.append(os.lseek(file, position, os.SEEK_DATA) // BUCKET_BYTES)
                position = (written[-1] + 1) * BUCKET_BYTES
        return file, written
    except BaseException:
        os.close(file)
        raise
