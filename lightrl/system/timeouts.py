"""Timeouts that count only time in which this process runs.

While this process is stopped by a terminal, or delayed by a busy machine or disk, messages of a
peer stay unread. So a timeout consists of several checks: a gap of any length counts as one check.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

CHECKS = 8  # of a timeout


async def silent_for(owes: Callable[[], bool], count: Callable[[], int], limit_s: float) -> None:
    """Return when `owes` is true and `count`, of messages, has not grown for `limit_s`."""
    num_silent, before = 0, count()
    while num_silent < CHECKS:
        await asyncio.sleep(limit_s / CHECKS)
        is_silent = owes() and count() == before
        num_silent, before = num_silent + 1 if is_silent else 0, count()


@contextlib.asynccontextmanager
async def patient_timeout(limit_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, counted in checks. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    left = CHECKS

    def check() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(limit_s / CHECKS, check)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(limit_s / CHECKS, check)
        try:
            yield
        finally:
            timer.cancel()
