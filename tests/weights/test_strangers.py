"""The weight server under those who have no ticket: they may neither keep others out nor stay."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

import pytest
import uvloop

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
            assert await reader.read() == b""
            assert time.monotonic() - begun > 1  # a slow line has time to say it
            writer.close()

    asyncio.run(scenario())
