"""Threads for the weights of a node, on a machine that may lack one for a while."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread, taken_in_thread
from lightrl.weights.machine.local import LocalVersion, close_found
from lightrl.weights.machine.store import Claim

P = ParamSpec("P")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


async def eventually(act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """In a thread; again and again while this machine lacks one."""
    call = partial(in_thread, partial(act, *args, **kwargs))
    return await retry_on_resource_limit(call, "a thread for the weights", logger.warning)


async def taken(
    give_back: Callable[[Result], object],
    act: Callable[P, Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """The same; what it returns when nobody waits for it any more goes to `give_back`."""
    call = partial(taken_in_thread, give_back, partial(act, *args, **kwargs))
    return await retry_on_resource_limit(call, "a thread for the weights", logger.warning)


async def find_proved(claim: Claim) -> tuple[LocalVersion, bool] | None:
    """As the claim finds it on this machine; a search for which nobody waits any more ends soon."""
    is_ended = threading.Event()
    try:
        return await taken(close_found, claim.find_proved, is_ended)
    except asyncio.CancelledError:
        is_ended.set()
        raise
