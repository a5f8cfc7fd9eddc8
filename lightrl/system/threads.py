"""Run blocking calls in a thread, and cancel tasks.

A lack of threads is an OSError (EAGAIN). Each call has its own pool: a shared pool would run a call
that it has refused once another one ends.
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
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def in_thread(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Run `act` in a thread and return its result. Cancelling returns immediately; `act` continues.

    Raises OSError if no thread can be started; `act` is then not called.
    """
    return await taken_in_thread(_leave, act, *args, **kwargs)


async def taken_in_thread(
    give_back: Callable[[Result], object],
    act: Callable[P, Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """As `in_thread`; when cancelled, the thread passes the result of `act` to `give_back`."""
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
    """Runs after `act`, in the same thread."""
    if not result.cancelled() and result.exception() is None:
        give_back(result.result())


def _leave(result: object) -> None:
    """Drop the result."""


async def cancel(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
