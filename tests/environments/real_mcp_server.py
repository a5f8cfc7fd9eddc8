"""An MCP server made with the package `mcp`: over stdio, or over HTTP at a port of this machine.

python real_mcp_server.py [--port PORT]
"""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("real")


@server.tool()
def add(a: int, b: int) -> int:
    """Add numbers."""
    return a + b


@server.tool()
def fail() -> str:
    raise KeyError("of the tool")


@server.tool()
def hang() -> str:
    time.sleep(1000)
    return ""


@server.tool()
def die() -> str:
    os._exit(7)


if __name__ == "__main__":
    if "--port" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    else:
        server.run("stdio")
