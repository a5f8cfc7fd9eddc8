"""Buckets of a pull that are made here instead of being pulled: of what is on this machine already.

Must not import torch. Blocks: for threads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from lightrl.weights.machine.local import HASH_THREADS
from lightrl.weights.pull.fetch import Fetch
from lightrl.weights.version.layout import BUCKET_BYTES, bucket_range

# (bucket, where to) -> whether it is there now, proved
Make: TypeAlias = Callable[[int, memoryview], bool]


def fill(fetch: Fetch, num_bytes: int, make: Make, buckets: int) -> int:
    """Has all of these (bits) of a file of `num_bytes` made that are missing, by threads; returns
    the bytes that were."""
    lacking: set[int] = set()  # could not be made

    def work() -> int:
        buffer = memoryview(bytearray(BUCKET_BYTES))
        made = 0
        while (bucket := fetch.take_bucket(buckets, lacking)) is not None:
            out: memoryview | None = None
            try:
                start, end = bucket_range(bucket, num_bytes)
                size = end - start
                if make(bucket, buffer[:size]):
                    out = buffer[:size]
                    made += size
                else:
                    with fetch.lock:  # others look through it
                        lacking.add(bucket)
            finally:
                fetch.put_bucket(bucket, out)
        return made

    num = min(HASH_THREADS, buckets.bit_count())
    with ThreadPoolExecutor(max(1, num), thread_name_prefix="weights-fill") as threads:
        results = [threads.submit(work) for _ in range(num)]
        return sum(result.result() for result in results)
