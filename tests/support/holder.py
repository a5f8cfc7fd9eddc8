"""A holder of weights that answers as a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from lightrl.weights.serve.request import (
    ALL,
    ASK_DATA,
    ASK_HAVE,
    ASK_MANIFEST,
    DATA,
    Request,
    num_missing,
    unpack,
)
from lightrl.weights.version.manifest import VersionFile

Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def holder(answer: Answer) -> AsyncIterator[str]:
    """Its address. `answer` is called for each request, one after the other on a connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        data = b""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                while missing := num_missing(data):
                    data += await reader.readexactly(missing)
                request, data = unpack(data), b""
                await answer(request, writer)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):  # it may come twice
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


def of(version: VersionFile, answer: Answer) -> Answer:
    """Has all of this version and says so; `answer` is called for its data."""

    manifest = Path(version.manifest_path).read_bytes()

    async def respond(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.what == ASK_HAVE:
            writer.write(ALL)
        elif request.what == ASK_MANIFEST:
            writer.write(DATA + manifest)
        else:
            assert request.what == ASK_DATA
            await answer(request, writer)

    return respond


def part(data: bytes, request: Request) -> bytes:
    return data[request.offset : request.offset + request.size]
