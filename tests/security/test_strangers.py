"""Who has no key: what its connections may cost the coordinator, and that they keep nobody out."""

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lightrl.config.run_file import to_toml
from lightrl.errors import WrongKey
from lightrl.keys import new_key, read_key
from lightrl.messages.snapshot import Watch
from lightrl.system import open_files
from lightrl.system.addresses import host_and_port
from lightrl.transport import link, unauthenticated
from lightrl.transport.link import Link
from lightrl.transport.router import Router
from lightrl.transport.zeromq import MAX_TO_ROUTER_BYTES
from tests.security.attacker import GREETING
from tests.support.daemons import ScriptedTrainer, make_config
from tests.support.routers import LIMIT_S, received, router_and_key, until

pytestmark = pytest.mark.usefixtures("warm_daemons")

MIB = 1 << 20
CURVE = GREETING + b"\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextlib.contextmanager
def stranger(router: Router, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    where = host_and_port(router.address)
    with socket.create_connection(where, LIMIT_S, source_address=(address, 0)) as sock:
        sock.sendall(CURVE)
        yield sock


def announce(size: int) -> bytes:
    """The beginning of a handshake command of so many bytes."""
    return b"\x06" + size.to_bytes(8, "big") + b"\x05HELLO"


# What a stranger may send


def test_a_frame_may_have_so_many_bytes_and_one_more_is_cut_off():
    assert MAX_TO_ROUTER_BYTES <= MIB

    async def scenario() -> None:
        async with router_and_key() as (router, _):
            with stranger(router) as within, stranger(router) as beyond:

                def talk() -> None:
                    for sock in (within, beyond):
                        greeting = b""
                        while len(greeting) < 64:
                            greeting += sock.recv(64 - len(greeting))
                    within.sendall(announce(MAX_TO_ROUTER_BYTES) + bytes(MAX_TO_ROUTER_BYTES - 7))
                    beyond.sendall(announce(MAX_TO_ROUTER_BYTES + 1))
                    beyond.settimeout(1.5)  # not only when its time is up, after three seconds
                    with contextlib.suppress(ConnectionError):
                        assert beyond.recv(1000) == b""
                    within.settimeout(0.05)
                    with pytest.raises(TimeoutError):
                        within.recv(1000)

                await asyncio.to_thread(talk)

    asyncio.run(scenario())


def test_a_hundred_strangers_who_send_all_they_may_cost_less_than_128_mib():
    async def scenario() -> None:
        async with router_and_key() as (router, _):
            before = resident_bytes()
            with contextlib.ExitStack() as stack:
                everyone = [stack.enter_context(stranger(router)) for _ in range(100)]

                def talk() -> None:
                    for sock in everyone:
                        with contextlib.suppress(ConnectionError):
                            sock.sendall(
                                announce(MAX_TO_ROUTER_BYTES) + bytes(MAX_TO_ROUTER_BYTES - 7)
                            )

                await asyncio.to_thread(talk)
                assert resident_bytes() - before < 128 * MIB
                async with asyncio.timeout(8):  # three seconds for each, and a busy machine
                    await until(lambda: len(router._unauthenticated) == 0)

    asyncio.run(scenario())


# Who goes when there are too many


def is_shut(sock: socket.socket) -> bool:
    """Whether the router has closed it; what it has said is read first."""
    sock.setblocking(False)
    try:
        while sock.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_the_oldest_of_the_address_with_most_of_them_goes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unauthenticated, "LEAST", 0)
    monkeypatch.setattr(unauthenticated, "MOST", 5)

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(Watch())
            await received(router, Watch)
            # the node's first look at the address is over
            await until(lambda: len(router._unauthenticated) == 0)
            with contextlib.ExitStack() as stack:
                few = [stack.enter_context(stranger(router, "127.0.0.3")) for _ in range(2)]
                many: list[socket.socket] = []
                for k in range(7):
                    many.append(stack.enter_context(stranger(router, "127.0.0.2")))
                    # One after the other: which of those that come at once is older, nobody knows.
                    await until(lambda k=k: many[k].recv(1) == b"\xff")
                await until(lambda: sum(map(is_shut, many)) == 4)
                assert [is_shut(sock) for sock in many] == [True] * 4 + [False] * 3
                assert not any(map(is_shut, few))
                node.send(Watch())  # it is no stranger
                await received(router, Watch)
            node.close()

    asyncio.run(scenario())


def test_peers_that_have_spoken_are_never_too_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unauthenticated, "LEAST", 0)
    monkeypatch.setattr(unauthenticated, "MOST", 1)

    async def scenario() -> None:
        async with router_and_key() as (router, key):
            broken: list[str] = []
            nodes: list[Link] = []
            for k in range(4):
                nodes.append(
                    Link(
                        router.address, f"n/{k}", key, on_break=lambda k=k: broken.append(f"n/{k}")
                    )
                )
                nodes[k].send(Watch())
                await received(router, Watch)
            with stranger(router) as old, stranger(router):
                await until(lambda: is_shut(old))
            for node in nodes:
                node.send(Watch())
                await received(router, Watch)
            assert broken == []
            for node in nodes:
                node.close()

    asyncio.run(scenario())


def test_time_in_which_nobody_is_heard_counts_against_nobody(monkeypatch: pytest.MonkeyPatch):
    """A loop that was busy has not answered yet whoever has come: those are not who must go."""
    monkeypatch.setattr(unauthenticated, "LEAST", 0)
    monkeypatch.setattr(unauthenticated, "MOST", 0)

    async def scenario() -> None:
        async with router_and_key() as (router, _):
            with stranger(router) as sock:
                await until(lambda: len(router._unauthenticated) == 1)
                time.sleep(2 * unauthenticated.PATIENCE_S)  # noqa: ASYNC251
                router._unauthenticated._check()
                assert len(router._unauthenticated) == 1
                await until(lambda: is_shut(sock))

    asyncio.run(scenario())


async def closed_before_wrong_key(patience_s: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many connections that are closed at once make a link give up; late is what takes
    `patience_s`."""
    monkeypatch.setattr(link, "PATIENCE_S", patience_s)
    monkeypatch.setattr(link, "MAX_RECONNECT_MS", 1)
    monkeypatch.setattr(link, "RECONNECT_MS", 1)
    count = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        def shut() -> None:  # here and now: a transport could outlive the loop that is to close it
            nonlocal count
            listener.accept()[0].close()
            count += 1

        loop = asyncio.get_running_loop()
        loop.add_reader(listener, shut)
        node = Link(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "n/1", new_key())
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(WrongKey):
                await node.receive()
        node.close()
        loop.remove_reader(listener)
    return count


def test_who_had_to_go_because_many_came_does_not_doubt_its_key_soon(
    monkeypatch: pytest.MonkeyPatch,
):
    assert asyncio.run(closed_before_wrong_key(3600.0, monkeypatch)) in {3, 4}
    assert asyncio.run(closed_before_wrong_key(0.0, monkeypatch)) >= link.MAX_DOUBT


# Descriptors


def test_nobody_gets_in_while_the_limit_is_raised_and_all_do_after_it():
    async def scenario() -> None:
        async with router_and_key() as (router, key):
            node = await Link.connect(router.address, "n", key)
            node.send(Watch())
            await received(router, Watch)
            with contextlib.ExitStack() as stack:
                with router._unauthenticated._accepts_nothing():
                    many = [stack.enter_context(stranger(router)) for _ in range(20)]
                    node.send(Watch())  # ZeroMQ's one thread looks at all of its connections
                    await received(router, Watch)
                    for sock in many:
                        sock.setblocking(False)
                        with pytest.raises(BlockingIOError):
                            sock.recv(1)
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(LIMIT_S):
                    for sock in many:
                        assert await loop.sock_recv(sock, 1) == b"\xff"
            node.close()
        assert not open_files.listeners

    asyncio.run(scenario())


STRANGERS = Path(__file__).parents[2] / "scripts" / "bench" / "strangers"
NUM_OPEN = 128  # descriptors that the coordinator may have
LIMITED = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {0})); "
    "os.execv(sys.executable, sys.argv[1:])"
)


@contextlib.asynccontextmanager
async def process(*command: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
    out = asyncio.subprocess.DEVNULL
    started = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, command), stdout=out, stderr=out
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.terminate()
        async with asyncio.timeout(LIMIT_S):
            await started.wait()


def coordinator(config_file: Path) -> tuple[str, ...]:
    """One that may have NUM_OPEN descriptors, if it asks for them."""
    command = ("-m", "lightrl.cli", "up", str(config_file), "--role", "coordinator")
    return ("-c", LIMITED.format(NUM_OPEN), sys.executable, *command)


def test_steps_go_on_and_nodes_join_while_strangers_take_all_descriptors(tmp_path: Path):
    """200 connections that always come back, at a limit of 128."""
    config = make_config(tmp_path, train={"steps": 3, "prompts_per_step": 4})
    file, run_dir = tmp_path / "run.toml", config.run_dir
    file.write_text(to_toml(config))

    async def scenario() -> None:
        async with asyncio.timeout(2 * LIMIT_S), process(*coordinator(file)) as head:
            await until(lambda: (run_dir / "address").exists())
            address, key_file = (run_dir / "address").read_text().strip(), run_dir / "key"
            async with process(STRANGERS, "attack", address, "200", "silent"):
                await until(lambda: num_open(head.pid) > NUM_OPEN * 0.8)
                join = ("--join", address, "--key", key_file)
                async with process("-m", "lightrl.cli", "up", *join, "--name", "a"):
                    trainer = ScriptedTrainer(tmp_path)
                    await trainer.run(address, read_key(key_file))
                    assert await head.wait() == 0
        summary = json.loads((run_dir / "summary.json").read_bytes())
        assert (summary["state"], summary["steps"]) == ("finished", 3)

    asyncio.run(scenario())


def num_open(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
