"""The weight server under those who have no ticket: they may neither keep others out nor stay."""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator

import pytest
import uvloop

from lightrl.weights.serve.door import FEW_PLACES, Door
from lightrl.weights.serve.request import ASK_DATA, Request
from tests.support.cores import waited_for_a_core_s
from tests.support.tiers import e2e
from tests.support.versions import make_version, pull, serving, source

DEADLINE_S = 60


def request(node: bytes) -> Request:
    return Request(ASK_DATA, bytes(32), 1, 0, 1, node, b"t")


@contextlib.asynccontextmanager
async def silent_peers(address: str, count: int, num_sources: int) -> AsyncIterator[None]:
    """A process of them, all of which have connected."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.silent", address, str(count), str(num_sources)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"all are there\n"
        yield
    finally:
        process.stdin.close()
        assert await process.wait() == 0


@pytest.mark.parametrize("num_sources", [2000, *e2e([1])])
def test_silent_peers_that_always_come_back_keep_nobody_out(tmp_path, num_sources):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        async with (
            serving(version) as server,
            silent_peers(server.addresses[0], 2000, num_sources),
            asyncio.timeout(DEADLINE_S),
        ):
            waited_s = waited_for_a_core_s()
            stats = await pull(version, [source(server)], tmp_path / "pulled")
            assert stats.seconds - (waited_for_a_core_s() - waited_s) < 5
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    uvloop.run(scenario())


def test_who_says_too_little_is_cut_off_soon(tmp_path):
    async def scenario() -> None:
        version = make_version(tmp_path / "v1", num_buckets=1)
        # Two seconds, and a busy machine. Not by the server's own constant: that may be what is
        # wrong.
        async with serving(version) as server, asyncio.timeout(10):
            host, _, port = server.addresses[0].rpartition(":")
            begun = time.monotonic()
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request(b"n").pack()[:-1])
            with pytest.raises(ConnectionResetError):  # and not as one whose ticket is wrong
                await reader.read()
            assert time.monotonic() - begun > 1  # a slow line has time to say it
            writer.close()

    asyncio.run(scenario())


def test_the_address_that_has_most_makes_room_and_who_has_asked_is_let_in():
    places = FEW_PLACES + 4

    async def scenario() -> None:
        let_in: asyncio.Queue[bytes] = asyncio.Queue()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)

        def show(sock: socket.socket, request: Request) -> None:
            let_in.put_nowait(request.node)
            sock.close()

        def connect(source: str) -> socket.socket:
            sock = stack.enter_context(socket.socket())
            sock.bind((source, 0))
            sock.connect(listener.getsockname())
            return sock

        with contextlib.ExitStack() as stack:
            door = Door(places, show)
            door.open(listener)
            honest = connect("127.0.0.2")  # the oldest of all
            attackers = [connect("127.0.0.3") for _ in range(places - 1)]
            attackers += [connect(source) for source in ("127.0.0.4", "127.0.0.5", "127.0.0.3")]
            async with asyncio.timeout(DEADLINE_S):
                loop = asyncio.get_running_loop()
                for cut in attackers[:3]:
                    cut.setblocking(False)
                    with pytest.raises(ConnectionResetError):
                        await loop.sock_recv(cut, 1)
                honest.sendall(request(b"honest").pack())
                assert await let_in.get() == b"honest"
                attackers[3].sendall(request(b"oldest").pack())
                # not read before it is its turn to go
                attackers += [connect("127.0.0.3") for _ in range(2)]
                assert await let_in.get() == b"oldest"
            door.close()

    asyncio.run(scenario())
