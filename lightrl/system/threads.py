"""Calls that would block an event loop, made in a thread.

Owns what a machine without a thread to spare means: one more thing that is lacking, an OSError
(EAGAIN). Threads of a pool are not used: a pool would make a call that it has refused as soon as
another one is over.
"""

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


async def in_thread(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """What `act` returns or raises. When cancelled it ends at once, but `act` goes on.

    Raises OSError if no thread can be started; `act` is then not called.
    """
    pool = ThreadPoolExecutor(1)
    try:
        try:
            result = pool.submit(act, *args, **kwargs)
        except RuntimeError as e:
            raise OSError(errno.EAGAIN, str(e)) from e
        return await asyncio.wrap_future(result)
    finally:
        pool.shutdown(wait=False)
