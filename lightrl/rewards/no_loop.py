"""Synchronous functions in the thread of a running event loop, as if it did not run.

User code runs event loops of its own (`asyncio.run`), which asyncio refuses in a thread with a
running one, and limits its time by signals, which the main thread alone receives: another thread is
no way out.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_running_loop() -> Iterator[None]:
    """Within it this thread has no running loop and no current task. Must be entered in a task;
    nothing may be awaited meanwhile."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    # see "Extending" in the documentation of asyncio
    asyncio._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio._enter_task(loop, task)
