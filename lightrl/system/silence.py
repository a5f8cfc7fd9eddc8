"""How long somebody has been silent, in looks: a limit that knows when this process did not look.

A process that stands still itself (stopped by its terminal, held up by a machine or a disk that
is busy) must not take that gap for the silence of somebody else: what was said meanwhile lies
there unread, and a clock alone would run out first. However long a gap is, it counts as one look.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

LOOKS = 8  # at somebody who owes an answer, before it is given up


async def silent_for(owes: Callable[[], bool], count: Callable[[], int], limit_s: float) -> None:
    """Returns when an answer is owed and their `count` has not grown for `limit_s`."""
    num_silent, heard = 0, count()
    while num_silent < LOOKS:
        await asyncio.sleep(limit_s / LOOKS)
        is_silent = owes() and count() == heard
        num_silent, heard = num_silent + 1 if is_silent else 0, count()


@contextlib.asynccontextmanager
async def patient_timeout(limit_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, counted in looks. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    left = LOOKS

    def look() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(limit_s / LOOKS, look)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(limit_s / LOOKS, look)
        try:
            yield
        finally:
            timer.cancel()
