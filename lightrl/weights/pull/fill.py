"""Buckets of a pull that are made here instead of being pulled: of what is on this machine already.

Must not import torch. What is not `async` blocks: for threads.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from lightrl.system.threads import in_thread
from lightrl.weights.machine.local import CHUNK_BYTES, HASH_THREADS
from lightrl.weights.pull.fetch import Fetch
from lightrl.weights.version.layout import bucket_range, num_buckets
from lightrl.weights.version.write import Write

# (bucket, memory to work in, what writes its bytes) -> whether it is there now, proved
Make: TypeAlias = Callable[[int, memoryview, Write], bool]


async def allocate(fetch: Fetch, path: Path, num_bytes: int) -> None:
    """While on hold: has memory (or disk) taken for the pull's file at `path`, from the first
    bucket on, until it is cancelled: what has its pages is written in half the time."""
    is_enough = threading.Event()
    working = asyncio.ensure_future(in_thread(_allocate, fetch, path, num_bytes, is_enough))
    try:
        await asyncio.shield(working)
    finally:
        is_enough.set()
        await asyncio.wait({working})


def _allocate(fetch: Fetch, path: Path, num_bytes: int, is_enough: threading.Event) -> None:
    """Buckets of which nothing was written stay holes to those who look for data."""
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
