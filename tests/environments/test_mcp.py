"""MCP servers: calls, hung and lost servers, and that no process is left."""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from lightrl.environments.worker.base import UserError
from lightrl.environments.worker.tools import ToolEpisode, load_tools

pytest.importorskip("mcp")

SERVER = str(Path(__file__).with_name("fake_mcp_server.py"))
REAL = str(Path(__file__).with_name("real_mcp_server.py"))
GONE_S = 20.0


@pytest.fixture
def folder(tmp_path):
    """Where each server says that it has started; checks that all have ended."""
    yield tmp_path
    deadline = time.monotonic() + GONE_S
    while left := [
        p for p in map(int, filter(str.isdigit, os.listdir(tmp_path))) if is_group_alive(p)
    ]:
        assert time.monotonic() < deadline, f"left: {left}"


def is_group_alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(folder: Path) -> int:
    return len([name for name in os.listdir(folder) if name.isdigit()])


async def until(true) -> None:
    async with asyncio.timeout(GONE_S):
        while not true():  # noqa: ASYNC110 - neither files nor processes tell anybody
            await asyncio.sleep(0)


def table(folder: Path, *args: str, per_episode: bool = False) -> dict:
    command = [sys.executable, "-S", SERVER, str(folder), *args]
    return {"command": command, "url": "", "per_episode": per_episode}


def run(test, *tables: dict, limit_s: float = 30.0):
    """Run the coroutine `test(tools)`."""

    async def within():
        tools = await load_tools([], tables, limit_s)
        try:
            return await test(tools)
        finally:
            await tools.close()

    return asyncio.run(within())


def test_tools_of_a_server_are_called(folder):
    async def test(tools):
        names = [each["function"]["name"] for each in tools.schemas]
        assert names == ["add", "hang", "die", "refuse", "fail", "leave", "later", "ignore", "pid"]
        assert tools.schemas[0]["function"]["description"] == "Add numbers."
        assert tools.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
        assert await tools.call("add", {"a": 2, "b": 3}) == "5"
        assert await tools.call("fail", {}) == "error: 0"
        assert await tools.call("refuse", {}) == "error: MCPError: refused"
        assert await tools.call("sub", {}) != "error: MCPError: refused"

    run(test, table(folder))
    assert started(folder) == 1  # a refused call costs no server


def test_a_hung_call_ends_by_the_limit_and_its_server_is_replaced(folder):
    async def test(tools):
        hung, pid = await asyncio.gather(tools.call("hang", {}), tools.call("pid", {}))
        assert hung == pid.replace("pid", "hang") == "error: hang gave no result within 1.5 s"
        assert await tools.call("add", {"a": 2, "b": 3}) == "5"

    run(test, table(folder), limit_s=1.5)
    assert started(folder) == 2


@pytest.mark.e2e
def test_other_calls_of_a_server_with_a_hung_one_are_answered(folder):
    async def test(tools):
        pid = await tools.call("pid", {})
        hung = asyncio.create_task(tools.call("ignore", {}))
        await asyncio.wait({hung}, timeout=2.0)  # begins before the other one
        other = asyncio.create_task(tools.call("later", {"a": 2, "b": 3}))
        assert await hung == "error: ignore gave no result within 4 s"
        assert await tools.call("pid", {}) != pid
        (folder / "later").unlink()
        assert await other == "5"
        await until(lambda: not is_group_alive(int(pid)))

    run(test, table(folder), limit_s=4.0)


def test_the_server_of_a_call_that_is_not_wanted_any_more_remains(folder):
    async def test(tools):
        pid = await tools.call("pid", {})
        unwanted = asyncio.create_task(tools.call("later", {}))
        await until((folder / "later").exists)
        unwanted.cancel()
        (folder / "later").unlink()
        assert await tools.call("pid", {}) == pid

    run(test, table(folder))


def test_a_server_that_dies_is_started_again(folder):
    async def test(tools):
        before = await tools.call("pid", {})
        for name in ("die", "leave"):
            assert (await tools.call(name, {})).startswith("error: MCPError: ")
            assert await tools.call("add", {"a": 2, "b": 3}) == "5"
        assert await tools.call("pid", {}) != before

    run(test, table(folder))
    assert started(folder) == 3


def test_a_call_after_the_death_is_not_lost(folder):
    async def test(tools):
        pid = int(await tools.call("pid", {}))
        os.kill(pid, 9)
        await until(lambda: not is_group_alive(pid))
        assert await tools.call("add", {"a": 2, "b": 3}) == "5"

    run(test, table(folder))


def test_a_server_that_cannot_be_started_again_is_no_answer(folder):
    async def test(tools):
        assert (await tools.call("die", {})).startswith("error: ")
        episode = ToolEpisode(tools)
        calls = [{"id": "c0", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
        with pytest.raises(UserError, match=r"environment\.mcp: .* cannot be started: MCPError"):
            await episode.step({"role": "assistant", "tool_calls": calls})

    run(test, table(folder, "1"))


def test_an_episode_may_have_a_server_of_its_own(folder):
    async def test(tools):
        episodes = [tools.for_episode() for _ in range(3)]
        pids = await asyncio.gather(*(each.call("pid", {}) for each in episodes))
        assert len({*pids}) == 3
        assert await episodes[0].call("pid", {}) == pids[0]
        await asyncio.gather(*(each.close() for each in episodes))
        await tools.for_episode().close()  # without a call it has started none
        assert not any(is_group_alive(int(pid)) for pid in pids)

    run(test, table(folder, per_episode=True))
    assert started(folder) == 4


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/no/such/server"], "no such command: /no/such/server"),
        ([sys.executable, "-c", "1"], "cannot be started: MCPError: Connection closed"),
        ([], "a server has either a command or a url"),
    ],
)
def test_a_server_that_cannot_be_started_is_one_line(folder, command, reason):
    async def test(tools): ...

    with pytest.raises(UserError) as raised:
        run(test, table(folder), {"command": command})
    assert str(raised.value) == f"environment.mcp: {' '.join(command)}: {reason}"


def test_an_address_without_a_server_is_one_line(folder):
    async def test(tools): ...

    with pytest.raises(UserError, match=r"^environment\.mcp: http://127\.0\.0\.1:9/mcp: cannot be"):
        run(test, {"url": "http://127.0.0.1:9/mcp"})


def test_without_the_package_one_line_says_how_to_install_it(folder, monkeypatch):
    async def test(tools): ...

    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError) as raised:
        run(test, table(folder))
    assert str(raised.value).endswith(f"install it: {sys.executable} -m pip install 'mcp>=2'")
    assert not os.listdir(folder)


@pytest.mark.e2e
@pytest.mark.parametrize(("is_own", "num"), [(False, 100), (True, 6)])
def test_episodes_with_a_published_server_leave_no_process(tmp_path, is_own, num):
    async def episode(tools, k: int) -> str:
        own = tools.for_episode()
        try:
            if k % 25 in (2, 4):
                await own.call("die" if k % 25 == 2 else "hang", {})
            return await own.call("add", {"a": k, "b": 1})
        finally:
            await own.close()

    async def test(tools):
        assert tools.schemas[0]["function"]["description"] == "Add numbers."
        assert (await tools.call("add", {"a": "x"})).startswith("error: ")
        assert (await tools.call("fail", {})).startswith("error: ")
        assert [await episode(tools, k) for k in range(num)] == [str(k + 1) for k in range(num)]

    server = {"command": [sys.executable, REAL, "--mark", str(tmp_path)]}
    run(test, {**server, "per_episode": is_own}, limit_s=10.0)
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in said(p)]


def said(cmdline: Path) -> str:
    try:
        return cmdline.read_text()
    except OSError:  # it has ended
        return ""


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return False
    return True


@pytest.mark.e2e
def test_a_server_over_http_may_be_started_again():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]

    async def start():
        server = await asyncio.create_subprocess_exec(sys.executable, REAL, "--port", str(port))
        async with asyncio.timeout(GONE_S):
            while not listens(port):  # noqa: ASYNC110 - a server tells nobody
                await asyncio.sleep(0.01)
        return server

    async def kill(server):
        server.kill()
        await server.wait()

    async def test():
        server = await start()
        tools = await load_tools([], [{"url": f"http://127.0.0.1:{port}/mcp"}], 3.0)
        assert await tools.call("add", {"a": 2, "b": 3}) == "5"
        assert await tools.call("hang", {}) == "error: hang gave no result within 3 s"
        assert await tools.call("add", {"a": 2, "b": 3}) == "5"
        await kill(server)
        server = await start()
        found = [await tools.call("add", {"a": 2, "b": 3}) for _ in range(2)]
        assert found[1] == "5"  # the first may say that the session is unknown
        assert (await tools.call("die", {})).startswith("error: MCPError: ")
        with pytest.raises(UserError, match="cannot be started: ConnectError"):
            await tools.call("add", {"a": 2, "b": 3})
        await tools.close()
        await kill(server) if server.returncode is None else None

    asyncio.run(test())
