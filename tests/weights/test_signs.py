"""What a puller makes of the signs of a holder: to be queued is no failure."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from lightrl.errors import WeightsError
from lightrl.messages.weights import WeightsSource
from lightrl.weights.serve.request import BUSY, DATA, QUEUED, Request
from lightrl.weights.version.layout import BUCKET_BYTES
from tests.support.holder import Answer, holder, of, part
from tests.support.versions import make_version, pull

DEADLINE_S = 60
TIMEOUT_S = 2.0
SIGNS = 7  # so many, a PERIOD_S apart, take longer than the timeout
PERIOD_S = 0.3


def run(tmp_path: Path, answer: Callable[[bytes], Answer], streams: int = 4) -> int:
    """Number of connections that a pull of four buckets from such a holder has made."""
    writers: set[asyncio.StreamWriter] = set()

    async def scenario() -> None:
        version = make_version(tmp_path / "v1")
        respond = of(version, answer((tmp_path / "v1").read_bytes()))

        async def noted(request: Request, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            await respond(request, writer)

        async with holder(noted) as address, asyncio.timeout(DEADLINE_S):
            limits = {"streams": streams, "timeout_s": TIMEOUT_S}
            sources = [WeightsSource("trainer", (address,), "t")]
            await pull(version, sources, tmp_path / "pulled", **limits)
        assert (tmp_path / "pulled").read_bytes() == (tmp_path / "v1").read_bytes()

    asyncio.run(scenario())
    return len(writers)


async def keep_queued(writer: asyncio.StreamWriter) -> None:
    for _ in range(SIGNS):
        writer.write(QUEUED)
        await writer.drain()
        await asyncio.sleep(PERIOD_S)


def test_who_is_queued_waits_for_longer_than_it_bears_silence(tmp_path):
    def answer(data: bytes) -> Answer:
        async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
            if request.offset == 0:
                await keep_queued(writer)
            writer.write(DATA + part(data, request))

        return respond

    assert run(tmp_path, answer, streams=1) == 1


def test_a_busy_source_is_asked_again(tmp_path):
    refused: list[Request] = []
    all_have_come = asyncio.Event()  # before one of them comes again

    def answer(data: bytes) -> Answer:
        async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
            if len(refused) < 5:
                refused.append(request)
                if len(refused) == 4:
                    all_have_come.set()
                await all_have_come.wait()
                writer.write(BUSY)
                writer.close()
            else:
                writer.write(DATA + part(data, request))

        return respond

    assert run(tmp_path, answer, streams=4) >= 5 + 1
    assert len({request.offset for request in refused}) == 4


def test_a_holder_that_speaks_otherwise_is_not_understood(tmp_path):
    def answer(data: bytes) -> Answer:
        async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\x00" + part(data, request)[: BUCKET_BYTES // 2])

        return respond

    with pytest.raises(
        WeightsError, match=r"no source serves it; last .*: does not serve weights as this"
    ):
        run(tmp_path, answer)
