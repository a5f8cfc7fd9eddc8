"""Serves an app in the running event loop, without signal handlers and a log of its own."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from lightrl.endpoints.app import EndpointApp
from lightrl.errors import LightRLError

if TYPE_CHECKING:
    from asyncio import Transport

HEAD_S = 20.0  # for the head of a request
# Longer than clients keep unused connections, or they would send on one that is being closed.
IDLE_S = 75
STOP_S = 5
MAX_CONNECTIONS = 16_384
BACKLOG = 2048


@contextlib.asynccontextmanager
async def serving(
    app: EndpointApp, host: str, port: int, head_s: float = HEAD_S
) -> AsyncGenerator[str, None]:
    """Serve an app until the block ends, then give up its open requests. Yields the URL of the
    server, without "/v1". Port 0: any that is free. Raises LightRLError if it cannot listen."""
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as e:
        raise LightRLError(
            f"cannot listen at {host}:{port}: {e.strerror}; give another address"
        ) from None
    config = uvicorn.Config(
        app,
        http=_protocol(head_s),
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # the app logs its errors
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.ensure_future(server.serve([sock]))
    name = f"[{host}]" if ":" in host else host
    try:
        # connections wait in the socket until the server has begun
        yield f"http://{name}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        app.close()
        await task


def _protocol(head_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with a limit of time for the head of a request, and of the number
    of connections."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class _LimitedProtocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: "Transport") -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
            self._expect_head(True)

        def handle_events(self) -> None:
            super().handle_events()
            is_new = self.cycle is None or bool(self.conn.trailing_data[0])
            self._expect_head(is_new and self.conn.their_state is h11.IDLE)

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_head(False)
            super().connection_lost(exc)

        def _expect_head(self, is_expected: bool) -> None:
            if self._late is not None and not is_expected:
                self._late.cancel()
                self._late = None
            elif self._late is None and is_expected:
                self._late = self.loop.call_later(head_s, self._abort)

        def _abort(self) -> None:
            self.transport.abort()

    return _LimitedProtocol
