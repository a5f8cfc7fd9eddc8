"""Who has the key of a run takes part; who has none, or another one, gets one line and nothing
else."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from lightrl.client import ask
from lightrl.errors import ConfigError, WrongKey
from lightrl.keys import (
    ENVIRONMENT,
    coordinator_public_key,
    find_key,
    new_key,
    read_key,
    write_key,
)
from lightrl.messages.nodes import Drain, Heartbeat
from lightrl.messages.responses import ResponseTokens, TokenChunk
from lightrl.messages.snapshot import Watch
from lightrl.tickets import pull_ticket
from lightrl.transport import link, zeromq
from lightrl.transport.link import Link
from lightrl.transport.router import Router
from lightrl.wire import MESSAGES
from tests.support.daemons import Proxy

pytestmark = pytest.mark.usefixtures("warm_daemons")

LIMIT_S = 90.0
ANY = "tcp://127.0.0.1:*"


def test_key_file_is_for_its_owner_alone_and_never_replaced(tmp_path: Path):
    old = os.umask(0)
    try:
        key = write_key(tmp_path / "key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert read_key(tmp_path / "key") == key
    assert len(bytes.fromhex(key)) == 32
    with pytest.raises(FileExistsError):
        write_key(tmp_path / "key")
    assert new_key() != new_key()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_key_that_others_can_read_is_refused(tmp_path: Path, mode: int):
    write_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match="others can read this key"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "0" * 63, "0" * 65, "ä" * 64])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path: Path, text: str):
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(ConfigError, match="not a key") as error:
        read_key(tmp_path / "key")
    assert not text or text not in str(error.value)
    with pytest.raises(ConfigError, match="cannot read the key"):
        read_key(tmp_path / "none")


def test_key_is_found_in_the_file_named_then_the_environment_then_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    named, run = write_key(tmp_path / "copy"), write_key(tmp_path / "key")
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert find_key(None, tmp_path) == run
    with pytest.raises(ConfigError, match="--key FILE"):
        find_key(None, None)
    monkeypatch.setenv(ENVIRONMENT, new_key())
    assert find_key(None, tmp_path) == os.environ[ENVIRONMENT]
    assert find_key(tmp_path / "copy", tmp_path) == named
    monkeypatch.setenv(ENVIRONMENT, "nonsense")
    with pytest.raises(ConfigError, match=ENVIRONMENT):
        find_key(None, tmp_path)


def test_ticket_differs_for_every_secret_node_and_version():
    tickets = {
        pull_ticket(secret, node, version)
        for secret in ("", "a" * 32, "b" * 32, "a" * 100, "a" * 101)
        for node in ("", "n", "n 1", "1")
        for version in (0, 1, 11)
    }
    assert len(tickets) == 5 * 4 * 3
    # as nodes of this protocol compute it
    assert pull_ticket("c0ffee", "rollout-0", 4) == "4cb0dfba3857923a483697c69bbd8083"


def test_messages_pass_between_those_who_have_the_key():
    async def scenario() -> None:
        key = new_key()
        router = Router(ANY, key)
        node = await Link.connect(router.address, "n", key)
        async with asyncio.timeout(LIMIT_S):
            node.send(Heartbeat())
            [(peer, message)] = await router.receive()
            assert message == Heartbeat()
            router.send(peer, Drain("n"))
            assert await node.receive() == [Drain("n")]
            while not node.is_up:  # noqa: ASYNC110 - libzmq says that beside, a little later perhaps
                await asyncio.sleep(0)
        node.close()
        router.close()

    asyncio.run(scenario())


def test_wrong_key_is_said_soon_and_nothing_of_what_was_sent_arrives():
    async def scenario() -> None:
        key = new_key()
        router = Router(ANY, key)
        right = await Link.connect(router.address, "right", key)
        start = time.monotonic()
        with pytest.raises(WrongKey, match="the key is not that of this run"):
            await ask.drain(router.address, "*", "stranger", new_key())
        assert time.monotonic() - start < 10.0  # a busy machine
        async with asyncio.timeout(LIMIT_S):
            right.send(Heartbeat())
            assert [m for _, m in await router.receive()] == [Heartbeat()]
        right.close()
        router.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["plain", "server key alone", "another client key"])
def test_half_a_key_does_not_do(how: str):
    """Who has learnt the coordinator's public key still has to prove that he may come."""

    async def scenario() -> None:
        key = new_key()
        router = Router(ANY, key)
        sock = zmq.Context.instance().socket(zmq.DEALER)
        sock.set(zmq.LINGER, 0)
        if how != "plain":
            public, secret = zmq.curve_keypair()
            if how == "another client key":
                public, secret = zeromq.key_pair(new_key())
            sock.set(zmq.CURVE_PUBLICKEY, public)
            sock.set(zmq.CURVE_SECRETKEY, secret)
            sock.set(zmq.CURVE_SERVERKEY, z85.encode(coordinator_public_key(key)))
        monitor: zmq.Socket[bytes] = sock.get_monitor_socket(sum(link._FAILED_HANDSHAKES))
        sock.connect(router.address)
        for _ in range(10):
            sock.send(MESSAGES.encode(Drain("*")))
        right = await Link.connect(router.address, "right", key)
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.to_thread(monitor.poll, int(LIMIT_S * 1000)), "it was not refused"
            right.send(Watch(1))
            while not (received := await router.receive()):
                pass
            assert [m for _, m in received] == [Watch(1)]
        sock.disable_monitor()
        monitor.close()
        sock.close()
        right.close()
        router.close()

    asyncio.run(scenario())


def test_two_runs_in_one_process_have_their_own_keys():
    async def scenario() -> None:
        keys = (new_key(), new_key())
        routers = [Router(ANY, k) for k in keys]
        async with asyncio.timeout(LIMIT_S):
            for router, key in zip(routers, keys, strict=True):
                node = await Link.connect(router.address, "n", key)
                node.send(Heartbeat())
                assert [m for _, m in await router.receive()] == [Heartbeat()]
                node.close()
            routers[0].close()
            with pytest.raises(WrongKey):
                await ask.drain(routers[1].address, "*", "", keys[0])
        routers[1].close()
        router = Router(ANY, keys[0])  # the first after the last is let in, too
        node = await Link.connect(router.address, "n", keys[0])
        async with asyncio.timeout(LIMIT_S):
            node.send(Heartbeat())
            await router.receive()
        node.close()
        router.close()

    asyncio.run(scenario())


def test_nobody_can_read_along():
    async def scenario() -> None:
        key, seen = new_key(), bytearray()

        class Wiretap(Proxy):
            async def passes(self, source: socket.socket, sink: socket.socket) -> None:
                loop = asyncio.get_running_loop()
                while data := await loop.sock_recv(source, 65536):
                    seen.extend(data)
                    await loop.sock_sendall(sink, data)

        router = Router(ANY, key)
        async with Wiretap(router.address) as tap, asyncio.timeout(LIMIT_S):
            node = await Link.connect(tap.address, "spied-on", key)
            node.send(Drain("a secret thing"))
            [(peer, _)] = await router.receive()
            router.send(peer, Drain("another secret"))
            await node.receive()
            node.close()
        router.close()
        assert len(seen) > 300
        assert not any(
            word in seen for word in (b"secret", b"spied-on", b"Drain", bytes.fromhex(key))
        )

    asyncio.run(scenario())


def test_broken_connection_is_noticed_and_comes_back():
    async def scenario() -> None:
        key, broke, back = new_key(), asyncio.Event(), asyncio.Event()
        router = Router(ANY, key)
        async with Proxy(router.address) as proxy, asyncio.timeout(LIMIT_S):
            node = await Link.connect(proxy.address, "n", key, on_break=broke.set, on_back=back.set)
            node.send(Heartbeat())
            await router.receive()
            assert not broke.is_set()
            proxy.cut()
            await broke.wait()
            await back.wait()
            node.send(Drain("n"))
            assert [m for _, m in await router.receive()] == [Drain("n")]
            node.close()
        router.close()

    asyncio.run(scenario())


def test_connection_that_fell_silent_is_noticed_although_it_stands():
    async def scenario() -> None:
        key, broke, back = new_key(), asyncio.Event(), asyncio.Event()
        muted = False

        class Swamp(Proxy):
            """Swallows everything while `muted`, without closing anything."""

            async def passes(self, source: socket.socket, sink: socket.socket) -> None:
                loop = asyncio.get_running_loop()
                while data := await loop.sock_recv(source, 65536):
                    if not muted:
                        await loop.sock_sendall(sink, data)

        router = Router(ANY, key)
        async with Swamp(router.address) as swamp, asyncio.timeout(LIMIT_S):
            node = await Link.connect(swamp.address, "n", key, on_break=broke.set, on_back=back.set)
            node.send(Heartbeat())
            await router.receive()
            muted = True
            start = time.monotonic()
            await broke.wait()
            assert time.monotonic() - start < (zeromq.HEARTBEAT_MS + zeromq.SILENCE_MS) / 1000 + 3.0
            muted = False
            await back.wait()
            node.close()
        router.close()

    asyncio.run(scenario())


def test_link_that_was_up_waits_for_its_own_run_whoever_listens_there_meanwhile():
    async def scenario() -> None:
        key, back = new_key(), asyncio.Event()
        router = Router(ANY, key)
        address = router.address
        node = await Link.connect(address, "n", key, on_back=back.set)
        async with asyncio.timeout(LIMIT_S):
            node.send(Heartbeat())
            await router.receive()
            router.close()
            other = await _router_at(address, new_key())
            receiving = asyncio.create_task(node.receive())
            # long enough for the node's own attempts to have failed, too
            with pytest.raises(WrongKey):
                await ask.drain(address, "*", "", new_key())
            assert not receiving.done()
            other.close()
            router = await _router_at(address, key)
            await back.wait()
            node.send(Drain("n"))
            peers = [p for p, m in await router.receive() if m == Drain("n")]
            router.send(peers[0], Drain("found"))
            assert await receiving == [Drain("found")]
        node.close()
        router.close()

    asyncio.run(scenario())


async def _router_at(address: str, key: str) -> Router:
    """The port of a router that has just been closed is free a moment later."""
    while True:
        try:
            return Router(address, key)
        except ConfigError:
            await asyncio.sleep(0.01)


def test_tokens_beyond_one_frame_leave_in_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "MAX_TO_ROUTER_BYTES", 10_000)
    responses = tuple(ResponseTokens(f"r{k}", 1, 0, bytes(800), bytes(800)) for k in range(40))

    async def scenario() -> None:
        key = new_key()
        router = Router(ANY, key)
        node = await Link.connect(router.address, "n", key)
        node.send(TokenChunk(3, "d", responses))
        got: list[ResponseTokens] = []
        async with asyncio.timeout(LIMIT_S):
            while len(got) < len(responses):
                for _, message in await router.receive():
                    assert isinstance(message, TokenChunk)
                    assert (message.policy_version, message.digest) == (3, "d")
                    got += message.responses
        assert tuple(got) == responses
        node.close()
        router.close()

    asyncio.run(scenario())


def test_tool_without_a_key_is_told_how_to_give_one():
    env = {k: v for k, v in os.environ.items() if k != ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-m", "lightrl.cli", "up", "--join", "tcp://127.0.0.1:1"],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert "--key FILE" in line
    assert ENVIRONMENT in line
