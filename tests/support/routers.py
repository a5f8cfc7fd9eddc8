"""A router without a coordinator behind it, for tests of what passes through it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from lightrl.errors import ProtocolError
from lightrl.keys import new_key
from lightrl.messages.message import Message
from lightrl.transport.router import Router

ANY = "tcp://127.0.0.1:*"
LIMIT_S = 60


@contextlib.asynccontextmanager
async def router_and_key() -> AsyncIterator[tuple[Router, str]]:
    key = new_key()
    router = Router(ANY, key)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield router, key
    finally:
        router.close()


async def received(router: Router, kind: type[Message]) -> tuple[str, Message]:
    """The first message of this kind, and who sent it."""
    while True:
        for peer, message in await router.receive():
            assert not isinstance(message, ProtocolError), message
            if isinstance(message, kind):
                return peer, message


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - neither a socket's end nor a process tells anybody here
            await asyncio.sleep(0.01)
