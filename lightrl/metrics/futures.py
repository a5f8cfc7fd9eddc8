"""What is computed in threads while a run goes on: a gigabyte of tokens takes a second.

Owns how it is begun, not what it is.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


def in_thread(
    threads: ThreadPoolExecutor, act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs
) -> Future[Result]:
    """Here and now if no thread can be started."""
    try:
        return threads.submit(act, *args, **kwargs)
    except RuntimeError:
        done: Future[Result] = Future()
        done.set_result(act(*args, **kwargs))
        return done


def known_digest(digest: bytes) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_result(digest)
    return future


def hash_onto(before: Future[bytes], of_step: Future[bytes]) -> bytes:
    """In the thread, which has done both by now: one after the other."""
    return hashlib.blake2b(before.result(0) + of_step.result(0), digest_size=16).digest()
