"""An MCP server over stdio that speaks its wire, JSON-RPC in lines, without any package.

    python fake_mcp_server.py FOLDER [NUM_STARTS]

Writes FOLDER/PID at each start. Fails from start NUM_STARTS on.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

STRING = {"type": "string"}
NUMBERS = {"type": "object", "properties": {"a": STRING, "b": STRING}, "required": ["a", "b"]}
TOOLS = ("add", "hang", "die", "refuse", "fail", "leave", "later", "ignore", "pid")


def main(folder: Path, num_starts: int) -> None:
    (folder / str(os.getpid())).touch()
    if len([*folder.glob("[0-9]*")]) > num_starts:
        sys.exit("no more starts")
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or request.get("params", {}).get("name") == "ignore":
            continue
        answer = answer_to(request["method"], request.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)


def answer_to(method: str, params: dict) -> dict:
    if method == "initialize":
        info = {"name": "fake", "version": "1"}
        version = params["protocolVersion"]
        said = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        return {"result": said}
    if method == "tools/list" and not params.get("cursor"):
        first = {"name": "add", "description": "Add numbers.", "inputSchema": NUMBERS}
        return {"result": {"tools": [first], "nextCursor": "more"}}
    if method == "tools/list":
        others = [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS[1:]]
        return {"result": {"tools": others}}
    if method == "tools/call":
        return call(params["name"], params.get("arguments") or {})
    return {"error": {"code": -32601, "message": f"no method {method}"}}


def call(name: str, arguments: dict) -> dict:
    if name == "hang":
        time.sleep(1000)
    if name == "later":
        wait_for_the_end_of(Path(sys.argv[1], "later"))
    if name == "die":
        os._exit(7)
    if name == "refuse":
        return {"error": {"code": -32602, "message": "refused"}}
    if name == "leave":
        subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
        os._exit(0)
    text = str(os.getpid()) if name == "pid" else str(arguments.get("a", 0) + arguments.get("b", 0))
    return {"result": {"content": [{"type": "text", "text": text}], "isError": name == "fail"}}


def wait_for_the_end_of(file: Path) -> None:
    file.touch()
    while file.exists():
        time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 30)
