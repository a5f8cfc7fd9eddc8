"""Buckets of a pull that are made here instead of being pulled: of what is on this machine already.

Must not import torch. Blocks: for threads.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from lightrl.weights.fetch import Fetch
from lightrl.weights.layout import bucket_range, num_buckets
from lightrl.weights.local import CHUNK_BYTES, HASH_THREADS

# (bytes, where in the version)
Write: TypeAlias = Callable[[memoryview, int], None]
# (bucket, memory to work in, what writes its bytes) -> whether it is there now, proved
Make: TypeAlias = Callable[[int, memoryview, Write], bool]


def allocate(fetch: Fetch, path: Path, num_bytes: int, is_enough: threading.Event) -> None:
    """While on hold: has memory (or disk) taken for the pull's file at `path`, from the first
    bucket on, until `is_enough` is set: what has its pages is written in half the time.

    Buckets of which nothing was written stay holes to those who look for data.
    """
    fetch.wait_idle()  # where there is no such call, libc writes zeros to what is not there yet
    with contextlib.suppress(OSError):  # is said when it is written
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for bucket in range(num_buckets(num_bytes)):
                if is_enough.is_set():
                    return
                start, end = bucket_range(bucket, num_bytes)
                os.posix_fallocate(descriptor, start, end - start)
        finally:
            os.close(descriptor)


def fill(fetch: Fetch, num_bytes: int, make: Make, buckets: int) -> int:
    """Has all of these (bits) of a file of `num_bytes` made that are missing, by threads; returns
    the bytes that were."""
    lacking: set[int] = set()  # could not be made

    def work() -> int:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        made = 0
        while (bucket := fetch.take_bucket(buckets, lacking)) is not None:
            is_whole = False
            try:
                is_whole = make(bucket, buffer, fetch.write)
                if is_whole:
                    start, end = bucket_range(bucket, num_bytes)
                    made += end - start
                else:
                    with fetch.lock:  # others look through it
                        lacking.add(bucket)
            finally:
                fetch.put_bucket(bucket, is_whole=is_whole)
        return made

    num = min(HASH_THREADS, buckets.bit_count())
    with ThreadPoolExecutor(max(1, num), thread_name_prefix="weights-fill") as threads:
        results = [threads.submit(work) for _ in range(num)]
        return sum(result.result() for result in results)
