"""MCP servers, over stdio or HTTP, with the package `mcp` of the worker's interpreter.

Owns when a server is started, replaced and ended. A connection lives in a task of its own, since
the contexts of `mcp` must be left by the task that entered them.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from lightrl.environments.worker.base import ToolSchema, UserError

START_S = 120.0  # of the first start: a command may download its program
# MCPError has these codes where the connection or the session is lost; others refuse one call.
_LOST = (-32000, -32600)
# `mcp` does not return the process id, which is also that of the group.
_SHELL = ["-c", 'echo $$ > "$0"; exec "$@"']
_LACKS = "needs the package mcp, release 2 or later; install it: {} -m pip install 'mcp>=2'"


class McpServer:
    """A server that is started for a call if it does not run: it has died, or a call of it hung. A
    server with a hung call ends as soon as it has no other calls. Always `close`."""

    is_plain = False  # calls need an event loop

    def __init__(self, table: Mapping[str, Any], limit_s: float) -> None:
        """`table`: {"command": [...]} or {"url": ...}, and "per_episode"; `limit_s`: of a call."""
        self.table = table
        self.limit_s = limit_s
        self.named = f"environment.mcp: {table.get('url') or ' '.join(table.get('command', ()))}"
        self._connections: list[_Connection] = []

    async def start(self) -> list[ToolSchema]:
        """Return the schemas of its tools. Raises UserError, one line."""
        command = self.table.get("command")
        if bool(command) == bool(self.table.get("url")):
            raise UserError(f"{self.named}: a server has either a command or a url")
        if command and shutil.which(command[0]) is None:
            raise UserError(f"{self.named}: no such command: {command[0]}")
        client = await self._connect().client(max(START_S, self.limit_s))
        schemas: list[ToolSchema] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                described = {"name": tool.name, "description": tool.description or ""}
                function = {**described, "parameters": tool.input_schema}
                schemas.append({"type": "function", "function": function})
            if not (cursor := page.next_cursor):
                return schemas

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of the result. The caller cancels this at the limit.

        Raises UserError if it cannot be started again, and MCPError: it refused the call or died.
        """
        began, connection = time.monotonic(), self._connect()
        connection.num_calls += 1
        try:
            client = await connection.client(self.limit_s / 2)
            result = await client.call_tool(name, arguments)
        except asyncio.CancelledError:  # perhaps only an episode that is not wanted any more
            connection.is_replaced |= time.monotonic() - began > 0.9 * self.limit_s
            raise
        except Exception as e:
            connection.is_replaced |= getattr(e, "code", _LOST[0]) in _LOST
            raise
        finally:
            connection.num_calls -= 1
            connection.end_if_idle()
        text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
        return f"error: {text}" if result.is_error else text

    async def close(self) -> None:
        """Returns when none of its processes is left."""
        for connection in self._connections:
            connection.end()
        await asyncio.gather(*(c.task for c in self._connections), return_exceptions=True)

    def _connect(self) -> "_Connection":
        self._connections = [c for c in self._connections if not c.task.done()]
        for connection in self._connections:
            if connection.is_usable():
                return connection
        self._connections.append(_Connection(self))
        return self._connections[-1]


class _Connection:
    """A running server and its session."""

    def __init__(self, server: McpServer) -> None:
        self.num_calls = 0
        self.is_replaced = False  # the next call starts another one
        self._named = server.named
        self._pid = 0
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve(server.table))

    async def client(self, limit_s: float) -> Any:
        """Return the mcp.Client. Raises UserError, one line."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._client), limit_s)
        except asyncio.TimeoutError:  # noqa: UP041, in Python 3.10 it is no TimeoutError
            raise UserError(f"{self._named}: did not start within {limit_s:g} s") from None

    def is_usable(self) -> bool:
        if self._pid:
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                self.is_replaced = True
        self.end_if_idle()
        return not self.is_replaced

    def end_if_idle(self) -> None:
        if self.is_replaced and not self.num_calls:
            self.end()

    def end(self) -> None:
        self._stop.set()
        if not self._client.done():
            self.task.cancel()

    async def _serve(self, table: Mapping[str, Any]) -> None:
        """Start the server and hold the session until `end`."""
        with tempfile.NamedTemporaryFile("r") as pid:
            try:
                import mcp  # takes seconds

                if not hasattr(mcp, "Client"):
                    raise ImportError
                server: Any = table.get("url")
                if command := table.get("command"):
                    args, env = [*_SHELL, pid.name, *command], {**os.environ}
                    server = mcp.StdioServerParameters(command="/bin/sh", args=args, env=env)
                async with mcp.Client(server) as client:
                    self._pid = int(pid.read() or 0)
                    self._client.set_result(client)
                    await self._stop.wait()
            except BaseException as e:  # a connection that was lost may raise here again
                while inner := getattr(e, "exceptions", None):  # a group
                    e = inner[0]
                why = f"cannot be started: {' '.join(f'{type(e).__name__}: {e}'.split())}"
                if isinstance(e, ImportError):
                    why = _LACKS.format(sys.executable)
                if not self._client.done():
                    self._client.set_exception(UserError(f"{self._named}: {why}"))
                    self._client.exception()  # known to be read, in case nobody waits any more
            finally:
                # what it has left in its group
                with contextlib.suppress(ValueError, ProcessLookupError):
                    pid.seek(0)
                    os.killpg(int(pid.read()), signal.SIGKILL)
