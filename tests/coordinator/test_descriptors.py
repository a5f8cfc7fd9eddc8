"""Which nodes are refused for lack of descriptors."""

import asyncio
import contextlib
import socket

import pytest

from lightrl.coordinator.descriptors import FOR_TOOLS, Descriptors
from lightrl.system import open_files
from tests.support.routers import router_and_key, until


def test_of_nodes_that_connect_at_once_the_first_have_room(monkeypatch: pytest.MonkeyPatch):
    """The router knows all of them before the first one is answered."""
    reported: list[str] = []
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            stack.enter_context(socket.socket())
        descriptors = Descriptors(reported.append, lambda: (24, 0))
        descriptors.check()
        others = open_files.num_open() - 24
        monkeypatch.setattr(open_files, "soft_limit", lambda: others + FOR_TOOLS + 3)
        assert [descriptors.why_no_room(n) is None for n in range(5)] == [True] * 3 + [False] * 2
    assert len(reported) == 2


def test_connections_that_are_shut_down_count_until_they_are_closed():
    """Else the coordinator would believe that something else has them, and refuse nodes."""

    async def scenario() -> None:
        async with router_and_key() as (router, _):
            descriptors, peers = Descriptors(print, router.num_connections), router._unauthenticated
            host, _, port = router.address.removeprefix("tcp://").rpartition(":")
            with contextlib.ExitStack() as stack:
                for _ in range(50):
                    stack.enter_context(socket.create_connection((host, int(port))))
                await until(lambda: len(peers) == 50)
                descriptors.check()
                before = descriptors._others
                assert before is not None
                for descriptor in list(peers._waiting):
                    peers._shut(descriptor)
                descriptors.check()
                # ZeroMQ reports each just before it closes it, one after the other
                assert descriptors._others <= before + 1
                await until(lambda: router.num_connections() == (0, 0))

    asyncio.run(scenario())
