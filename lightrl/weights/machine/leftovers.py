"""What an earlier pull, of whatever process, left of a version: which buckets it wrote, which of
them are right.

Must not import torch. Blocks: for threads.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from lightrl.weights.version.layout import BUCKET_BYTES, bucket_range


class Provable(Protocol):
    """What a manifest says of a file, whatever is in it."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_buckets(self) -> int: ...
    def digest_of(self, bucket: int) -> bytes: ...


@dataclass(slots=True)
class Begun:
    """A bucket of which something has come."""

    received: int = 0
    digest: blake3 = field(default_factory=blake3)
    nodes: set[str] = field(default_factory=set)  # that sent it


def partial_path(path: Path) -> Path:
    """Where a version that will be at `path` grows: "path.part". What an earlier pull left there,
    of whatever process, is hashed and used as far as it is right."""
    return path.with_name(path.name + ".part")


def allocated_bytes(path: Path) -> int:
    """That the file takes; holes take nothing, nor does a file that is not there."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def written_bytes(path: Path) -> int:
    """Of the file that hold data; not what is only allocated."""
    found = end = 0
    with contextlib.suppress(OSError), path.open("rb") as file:
        while True:  # until nothing but a hole follows
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found += end - start
    return found


def open_partial(path: Path, size: int) -> tuple[int, list[int]]:
    """The file, of that size from now on, and the buckets of which something was written. Raises
    OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, size)
        return file, written_buckets(file, size)
    except BaseException:
        os.close(file)
        raise


def written_buckets(file: int, size: int) -> list[int]:
    """Those of which something was written."""
    found, position = list[int](), 0
    while position < size:
        try:
            bucket = os.lseek(file, position, os.SEEK_DATA) // BUCKET_BYTES
        except OSError:  # nothing but holes follows
            break
        found.append(bucket)
        position = (bucket + 1) * BUCKET_BYTES
    return found


def is_right(
    file: int, bucket: int, manifest: Provable, buffer: memoryview, goes_on: Callable[[], bool]
) -> bool:
    """Whether a bucket of the file is what the manifest says, read by portions of `buffer`."""
    position, end = bucket_range(bucket, manifest.num_bytes)
    digest = blake3()
    while position < end and goes_on():
        n = os.preadv(file, [buffer[: end - position]], position)
        if n == 0:
            return False
        digest.update(buffer[:n])
        position += n
    return digest.digest() == manifest.digest_of(bucket)
