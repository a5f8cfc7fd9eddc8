"""A hub without a coordinator behind it, for tests of what passes through it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from lightrl.errors import ProtocolError
from lightrl.keys import new_key
from lightrl.messages import Message
from lightrl.transport.hub import Hub

ANY = "tcp://127.0.0.1:*"
LIMIT_S = 60


@contextlib.asynccontextmanager
async def hub_and_key() -> AsyncIterator[tuple[Hub, str]]:
    key = new_key()
    hub = Hub(ANY, key)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield hub, key
    finally:
        hub.close()


async def received(hub: Hub, kind: type[Message]) -> tuple[str, Message]:
    """The first message of this kind, and who sent it."""
    while True:
        for peer, message in await hub.receive():
            assert not isinstance(message, ProtocolError), message
            if isinstance(message, kind):
                return peer, message


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - neither a socket's end nor a process tells anybody here
            await asyncio.sleep(0.01)
