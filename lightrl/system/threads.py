"""Blocking calls in a thread, and the end of tasks.

A machine without a thread to spare raises OSError (EAGAIN). No pool of several threads is used: it
would make a call that it has refused as soon as another one is over.
"""

import asyncio
import concurrent.futures
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def in_thread(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """What `act` returns or raises. When cancelled it ends at once, but `act` goes on.

    Raises OSError if no thread can be started; `act` is then not called.
    """
    return await taken_in_thread(_leave, act, *args, **kwargs)


async def taken_in_thread(
    give_back: Callable[[Result], object],
    act: Callable[P, Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """As `in_thread`. When cancelled, the result goes to `give_back`, in the same thread."""
    pool = ThreadPoolExecutor(1)
    try:
        try:
            result = pool.submit(act, *args, **kwargs)
        except RuntimeError as e:
            raise OSError(errno.EAGAIN, str(e)) from e
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            pool.submit(_give_back, result, give_back)
            raise
    finally:
        pool.shutdown(wait=False)


def _give_back(
    result: "concurrent.futures.Future[Result]", give_back: Callable[[Result], object]
) -> None:
    """It is over: calls of a pool of one thread are made one after the other."""
    if not result.cancelled() and result.exception() is None:
        give_back(result.result())


def _leave(result: object) -> None:
    """Nobody need have it."""


async def cancel(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
