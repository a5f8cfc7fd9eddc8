"""Threads for the weights of a node, on a machine that may lack one for a while."""

import logging
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread, taken_in_thread

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
