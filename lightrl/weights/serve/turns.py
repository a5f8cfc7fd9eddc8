"""Whose turn it is to be sent to: so many at once, the others in the order in which they asked.

A turn lasts for one request. Who is slow must not keep others waiting and does not need the turn,
since there is line left: it is passed on to the next, and the slow transfer goes on beside it.
Knows no sockets.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from lightrl.weights.serve.request import SIGN_S

TURN_S = 10.0  # at most


class Turn:
    """A place among those who are sent to."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_mine = True

    def pass_on(self) -> None:
        """Somebody else may begin. Passing on twice does nothing."""
        if self._is_mine:
            self._is_mine = False
            self._places.release()


class Turns:
    def __init__(self, num_places: int) -> None:
        # hands its places out in the order of the calls
        self._places = asyncio.Semaphore(num_places)

    @contextlib.asynccontextmanager
    async def acquire(self, is_queued: Callable[[], Awaitable[None]]) -> AsyncIterator[Turn]:
        """A turn, when it has come. Until then `is_queued` is awaited every SIGN_S, and may
        raise."""
        await self._wait(is_queued)
        turn = Turn(self._places)
        limit = asyncio.get_running_loop().call_later(TURN_S, turn.pass_on)
        try:
            yield turn
        finally:
            limit.cancel()
            turn.pass_on()

    async def _wait(self, is_queued: Callable[[], Awaitable[None]]) -> None:
        if not self._places.locked():
            await self._places.acquire()  # at once
            return
        taking = asyncio.ensure_future(self._places.acquire())
        try:
            while not taking.done():
                await is_queued()
                await asyncio.wait({taking}, timeout=SIGN_S)
        except BaseException:
            if not taking.cancel():
                self._places.release()
            raise
