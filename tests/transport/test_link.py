"""The router and its links: messages of any size arrive, and whoever closes is heard out."""

import asyncio
import contextlib
import sys
import time

import pytest
import zmq
from zmq.utils import z85

from lightrl.core.responses.responses import MAX_ORDER_BYTES, orders
from lightrl.errors import PeerUnreachable, ProtocolError
from lightrl.keys import coordinator_public_key
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL, TAKEN, Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import (
    Generate,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    TokenChunk,
)
from lightrl.messages.snapshot import Watch
from lightrl.messages.training import TrainGroup, TrainResponse, TrainShard
from lightrl.transport import zeromq
from lightrl.transport.link import Link
from lightrl.transport.parts import HEADER
from lightrl.transport.router import MAX_WELCOMES, MAX_WHOLE_BYTES
from lightrl.wire import MESSAGES
from tests.support.routers import received, router_and_key, until

MIB = 1 << 20


def hello(num_running: int = 0) -> Hello:
    running = tuple((f"train-{k:06}@12#3", k) for k in range(num_running))
    return Hello("n", 1, ("rollout",), PROTOCOL, 1, "h", running=running)


def shard(num_tokens: int) -> TrainShard:
    tokens, responses = bytes(4 * num_tokens), [f"train-{k:06}@12#3" for k in range(100)]
    groups = (TrainResponse(r, tokens, tokens, 1.0, "stop") for r in responses)
    return TrainShard(3, 0, 3, tuple(TrainGroup(r.response, tokens, (r,)) for r in groups))


# A process that says a few MiB and its good-bye, and ends at once.
GOES = """
import asyncio, os, sys
from lightrl.messages.nodes import Bye, Hello, PROTOCOL
from lightrl.transport.link import Link
from lightrl.transport.zeromq import leave

async def speak(address, key):
    link = await Link.connect(address, "n", key)
    link.send(Hello("n", 1, ("rollout",), PROTOCOL, 1, "h"))
    while not link.is_up:
        await asyncio.sleep(0)
    for _ in range(3000):
        link.send(Bye("x" * 4000))
    link.send(Bye("over"))
    link.close()
    leave()
    os._exit(0)

asyncio.run(speak(*sys.argv[1:]))
"""

LARGE = [hello(60_000), shard(10_000)]


@pytest.mark.parametrize("message", LARGE, ids=lambda m: type(m).__name__)
def test_large_messages_reach_the_router_in_parts(message: Message):
    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(message)
            assert (await received(router, type(message)))[1] == message
            assert not router._partial
            node.close()

    asyncio.run(scenario())


def test_a_response_that_is_larger_than_a_frame_reaches_the_router_in_pieces():
    item = ResponseTokens("r", 1, 7, bytes(range(256)) * 1000, bytes(256_000), "length")

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(TokenChunk(3, "d", (item,)))
            got: list[ResponseTokens] = []
            while not got or got[-1].finish_reason is None:
                for _, chunk in await router.receive():
                    assert isinstance(chunk, TokenChunk), chunk
                    got += chunk.responses
            assert b"".join(i.token_ids for i in got) == item.token_ids
            assert [i.offset for i in got[:2]] == [7, 7 + len(got[0].token_ids) // 4]
            node.close()

    asyncio.run(scenario())


def test_an_order_of_two_thousand_long_responses_reaches_its_node_in_several_messages():
    """2,048 slots, each with a prefix of 32k tokens: 256 MiB."""
    prefix = bytes(4 << 15)
    requests = [ResponseRequest(f"train-{k}@3#0", 2, k, b"abcd", prefix, 9) for k in range(2048)]

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(Watch())
            peer, _ = await received(router, Watch)
            came: list[str] = []
            for order in orders(3, Sampling(), requests):
                router.send(peer, order)
                [got] = await node.receive()  # one at a time: all of them are 256 MiB
                assert isinstance(got, Generate)
                assert got == order
                assert sum(len(r.prefix) for r in got.requests) <= MAX_ORDER_BYTES
                came += [r.response for r in got.requests]
            assert came == [r.response for r in requests]
            node.close()

    asyncio.run(scenario())


def test_large_messages_reach_a_node_in_parts():
    request = ResponseRequest("r", 1, 9, b"", bytes(5 * MIB), 1)
    messages = [
        Welcome("run", model_files={"tokenizer.json": bytes(20 * MIB)}),
        Generate(3, Sampling(), (request,)),
    ]

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(Watch())
            peer, _ = await received(router, Watch)
            for message in messages:
                router.send(peer, message)
            got: list[Message] = []
            while len(got) < len(messages):
                got += await node.receive()
            assert got == messages
            node.close()

    asyncio.run(scenario())


def test_parts_of_a_peer_are_bounded_and_go_with_it():
    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node._send_frames([HEADER.pack(1, 0, MAX_WHOLE_BYTES + 1), b"x"])
            [(_, error)] = await router.receive()
            assert isinstance(error, ProtocolError)
            node._send_frames([HEADER.pack(2, 0, MAX_WHOLE_BYTES), b"x"])
            node.send(Bye("before the rest"))
            await received(router, Bye)
            assert len(router._partial) == 1
            node.close()
            receiving = asyncio.create_task(router.receive())
            await until(lambda: not router._partial)
            receiving.cancel()

    asyncio.run(scenario())


# Peers that ask for more than they take


def test_a_peer_that_is_welcomed_again_and_again_must_come_anew():
    """Each welcome may be megabytes, and ZeroMQ does not say whether anybody reads."""

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            back = asyncio.Event()
            node = await Link.connect(router.address, "n", key, on_back=back.set)
            for turn in range(2):
                for k in range(MAX_WELCOMES):
                    node.send(hello())
                    peer, _ = await received(router, Hello)
                    router.send(peer, Welcome(f"{turn}.{k}"))
                    # small: as often as it is asked for
                    router.send(peer, Welcome("", refused=TAKEN))
                said: list[str] = []
                while len(said) < MAX_WELCOMES:
                    said += [
                        m.run
                        for m in await node.receive()
                        if isinstance(m, Welcome) and not m.refused
                    ]
                assert said == [f"{turn}.{k}" for k in range(MAX_WELCOMES)]
                assert not back.is_set()
                for _ in range(3):
                    with pytest.raises(PeerUnreachable):
                        router.send(peer, Welcome("once more"))
                await back.wait()
                back.clear()
            node.close()
            receiving = asyncio.create_task(router.receive())
            await until(lambda: not router._connections and not router._welcomes)
            receiving.cancel()

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightrl.transport.router.MAX_WAITING", 64)

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            public, secret = zeromq.key_pair(key)
            node = zmq.Context.instance().socket(zmq.DEALER)
            node.set(zmq.LINGER, 0)
            node.set(zmq.RCVHWM, 1)
            node.set(zmq.RCVBUF, 1 << 16)
            node.set(zmq.CURVE_PUBLICKEY, public)
            node.set(zmq.CURVE_SECRETKEY, secret)
            node.set(zmq.CURVE_SERVERKEY, z85.encode(coordinator_public_key(key)))
            node.set(zmq.IDENTITY, b"n/1")
            node.connect(router.address)
            node.send(MESSAGES.encode(Watch()))
            peer, _ = await received(router, Watch)
            num_sent = 0
            with contextlib.suppress(PeerUnreachable):
                while num_sent < 3000:  # what the kernel holds is less
                    router.send(peer, Bye("x" * 60_000))
                    num_sent += 1
            assert 32 <= num_sent < 3000
            await until(lambda: bool(router._unauthenticated.gone))
            node.close()

    asyncio.run(scenario())


def test_no_more_is_taken_at_once_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch):
    """At either end. All of it has arrived before: the connection has ended since."""
    message, count = Drain("n", "x" * 1100), 40
    monkeypatch.setattr("lightrl.transport.router.MAX_DRAIN_BYTES", 4096)
    monkeypatch.setattr("lightrl.transport.link.MAX_DRAIN_BYTES", 4096)

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(Watch())
            await received(router, Watch)
            for _ in range(count):
                node.send(message)
            node.close()
            await until(lambda: bool(router._unauthenticated.gone))
            sizes: list[int] = []
            while sum(sizes) < count:
                sizes.append(len(await router.receive()))
            assert max(sizes) == 4

            broke = asyncio.Event()
            other = await Link.connect(router.address, "n", key, on_break=broke.set)
            other.send(Watch())
            peer, _ = await received(router, Watch)
            for _ in range(count):
                router.send(peer, message)
            router.close()
            await broke.wait()
            sizes = []
            while sum(sizes) < count:
                sizes.append(len(await other.receive()))
            assert max(sizes) == 4
            other.close()

    asyncio.run(scenario())


# Goodbyes


def test_a_message_that_comes_just_after_nothing_was_found_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
):
    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(Heartbeat())
            await until(router._has_input)
            look = router._receive_all
            answers = iter([list])  # as if it had not been there yet
            monkeypatch.setattr(router, "_receive_all", lambda: next(answers, look)())
            assert [message for _, message in await router.receive()] == [Heartbeat()]
            node.close()

    asyncio.run(scenario())


def test_what_a_peer_said_before_it_closed_is_received_before_it_is_lost():
    """A thousand goodbyes, while the router does nothing but send."""

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            for turn in range(20):
                nodes = [Link(router.address, f"n/{turn}-{k}", key) for k in range(50)]
                for node in nodes:
                    node.send(Watch())
                peers: set[str] = set()
                while len(peers) < len(nodes):
                    peers |= {peer for peer, _ in await router.receive()}
                for node in nodes:
                    node.send(Bye("drained"))
                    node.close()
                for peer in peers:
                    with contextlib.suppress(PeerUnreachable):
                        while True:
                            router.send(peer, Bye("busy"))
                            # Its thread has to encrypt what is sent.
                            time.sleep(0.0002)  # noqa: ASYNC251
                    router.drain(peer)
                heard: dict[str, list[type]] = {peer: [] for peer in peers}
                while sum(map(len, heard.values())) < 2 * len(nodes):
                    for peer, message in await router.receive():
                        heard[peer].append(type(message))
                assert set(map(tuple, heard.values())) == {(Bye, PeerUnreachable)}

    asyncio.run(scenario())


def test_a_peer_that_comes_back_with_a_hello_is_not_lost():
    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(Watch())
            peer, _ = await received(router, Watch)
            node.send(hello())
            node.send(Bye("last"))
            router.drain(peer)
            await until(router._has_input)
            heard: list[object] = []
            while not any(isinstance(m, Bye) for m in heard):
                heard += [message for _, message in await router.receive()]
            assert not any(isinstance(m, PeerUnreachable) for m in heard)
            node.close()

    asyncio.run(scenario())


def test_the_last_messages_of_a_process_leave_before_it_ends():
    async def scenario() -> None:
        async with router_and_key() as (router, key):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", GOES, router.address, key
            )
            heard: list[object] = []
            while Bye("over") not in heard[-1:]:
                heard += [message for _, message in await router.receive()]
            assert len(heard) == 3002
            assert await process.wait() == 0

    asyncio.run(scenario())
