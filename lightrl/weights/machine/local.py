"""A version on this machine that somebody is about to read: locked against who would write to it,
and proved bucket by bucket.

For threads, all of it; whoever has a `LocalVersion` closes it in one, too: the last one that closes
a file gives its pages back, which takes 0.15 s for each GB. Must not import torch.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lightrl.errors import WeightsError
from lightrl.weights.machine.leftovers import is_right
from lightrl.weights.version.manifest import VersionFile, read_manifest

HASH_THREADS = min(4, os.cpu_count() or 1)
CHUNK_BYTES = 1 << 20  # stays in a core's cache between reading and hashing


@dataclass(slots=True)
class LocalVersion:
    """A version's file, open and locked (shared): nobody overwrites it until `close`."""

    file: VersionFile
    descriptor: int
    # what goes with it, by `close`
    on_close: list[Callable[[], None]] = field(default_factory=list["Callable[[], None]"])

    def close(self) -> None:
        """Twice does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        while self.on_close:
            self.on_close.pop()()


def open_version(file: VersionFile) -> LocalVersion | None:
    """None if there is no such file of the size that it should have, or somebody writes to it."""
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


def prove(version: LocalVersion, is_ended: threading.Event) -> None:
    """Hashes all of it, at memory's speed. Raises WeightsError at the first bucket that is wrong,
    or when `is_ended` is set."""
    manifest = read_manifest(version.file)
    if manifest.num_bytes != version.file.num_bytes:
        raise WeightsError(f"{version.file.path}: not of the size that its manifest says")
    num = min(HASH_THREADS, manifest.num_buckets)
    wrong = threading.Event()

    def check(first: int) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for bucket in range(first, manifest.num_buckets, num):
            if wrong.is_set() or is_ended.is_set():
                return
            if not is_right(version.descriptor, bucket, manifest, buffer, lambda: True):
                wrong.set()
                raise WeightsError(f"{version.file.path}: bucket {bucket}: digest differs")

    with ThreadPoolExecutor(num, thread_name_prefix="weights-prove") as threads:
        for result in [threads.submit(check, first) for first in range(num)]:
            result.result()
    if is_ended.is_set():
        raise WeightsError("not wanted any more")


def close_version(version: LocalVersion | None) -> None:
    if version is not None:
        version.close()


def close_found(found: tuple[LocalVersion, bool] | None) -> None:
    """As a store finds it."""
    if found is not None:
        found[0].close()


def close_all(versions: Iterable[LocalVersion]) -> None:
    for version in versions:
        version.close()
