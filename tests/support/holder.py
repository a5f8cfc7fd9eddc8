"""A holder of weights that answers as a test says."""

import asyncio
import contextlib
import socket
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
from tests.support.listener import Listener
from tests.support.relay import address_of, bound_socket

Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def holder(answer: Answer) -> AsyncIterator[str]:
    """Its address. `answer` is called for each request, one after the other on a connection."""

    async def serve(sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            data = b""
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while not writer.is_closing():
                    while missing := num_missing(data):
                        data += await reader.readexactly(missing)
                    request, data = unpack(data), b""
                    await answer(request, writer)
                    await writer.drain()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    sock = bound_socket()
    listener = Listener(sock, serve)
    try:
        yield address_of(sock)
    finally:
        await listener.close()


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
