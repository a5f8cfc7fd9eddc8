"""Where a node serves what it holds: said after each welcome, before anything else."""

import asyncio
from pathlib import Path

import pytest

from lightrl.messages.nodes import Hello
from lightrl.messages.weights import WeightsEndpoint, WeightsReady
from lightrl.system.addresses import split_address
from tests.daemon.test_reconnect import scripted
from tests.support.scripted_coordinator import ScriptedHead, rollout_daemon

pytestmark = pytest.mark.usefixtures("warm_daemons")


async def first_after_welcome(head: ScriptedHead) -> WeightsEndpoint:
    head.skip()
    head.send(head.welcome)
    said = await head.expect(object)  # type: ignore[type-var]
    assert isinstance(said, WeightsEndpoint), said
    return said


def test_a_node_says_where_it_serves_weights_after_each_welcome(tmp_path: Path):
    async def scenario() -> None:
        async with scripted(tmp_path) as head, rollout_daemon(head.address, head.key_file):
            await head.hello()
            endpoint = await first_after_welcome(head)
            assert len(endpoint.secret) >= 32
            [address] = endpoint.addresses
            found = split_address(address)
            assert found is not None
            _, writer = await asyncio.open_connection(*found)
            writer.close()
            head.offer("a", 0)
            await head.expect(WeightsReady)
            assert isinstance(await head.ask_to_rejoin(), Hello)
            assert await first_after_welcome(head) == endpoint

    asyncio.run(scenario())
