"""Programs as episodes, over HTTP: what becomes of their requests, their end and their errors."""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.environment import Environment
from lightrl.endpoints.api import SamplingLimits
from lightrl.environments.calls import (
    EnvironmentRaised,
    EnvironmentUnusable,
    StepTimedOut,
    TurnTokens,
    WorkerLost,
)
from lightrl.environments.programs import Programs
from tests.support.daemons import DEADLINE_S

KEY = "environment-0"
ROW = {"index": 4, "question": "1 + 1?", "n": 3}
# An agent of the standard library: others take a second to import.
AGENT = """
import json, os, sys, urllib.error, urllib.request

def call(path, body=None):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        return json.load(e)

messages = []
def ask(text, **more):
    messages.append({"role": "user", "content": text})
    got = call("/chat/completions", {"model": "m", "messages": messages, **more})
    if "error" in got:
        return got["error"]["message"]
    messages.append(got["choices"][0]["message"])
    return messages[-1]["content"]
"""
PLAYS = "\n".join(
    [
        "what = ask(sys.argv[1])",
        "print(ask(what + '?'), flush=True)",
        "call('/episode', {'reward': 0.5, 'metrics': {'turns': 2}})",
    ]
)

Story = Callable[[Programs], Awaitable[None]]


def turn(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tokens(*ids: int, finish: Any = "stop") -> TurnTokens:
    return TurnTokens([1], array("i", ids), array("f", [-0.5] * len(ids)), finish, 3)


def play(folder: Path, story: Story, code: str = PLAYS, **settings: Any) -> None:
    (folder / "agent.py").write_text(AGENT + code)
    program = f"{sys.executable} -S {folder}/agent.py {{question}} {{n}} {{nothing}}"
    given = {"program": program, "timeout_s": DEADLINE_S, **settings}
    programs = Programs(Environment(**given), SamplingLimits("tiny", 64), KEY, "model", folder)

    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await programs.start()
            try:
                await story(programs)
            finally:
                await programs.stop()

    asyncio.run(limited())


def request(programs: Programs, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(f"{programs.address}/v1{path}", data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def test_requests_are_observations_until_the_program_ends(tmp_path: Path):
    async def story(at: Programs) -> None:
        first = await at.reset("r.1.0", ROW, 7)
        assert first.messages == [{"role": "user", "content": "1 + 1?"}]
        second = await at.step("r.1.0", turn("2"), tokens(5))
        assert [m["content"] for m in second.messages] == ["2?"]
        over = await at.step("r.1.0", turn("Yes."), tokens(6))
        assert (over.done, over.reward, over.metrics) == (True, 0.5, {"turns": 2.0})
        assert "Yes." in (tmp_path / "program-0.log").read_text()
        again = await at.reset("r.1.1", ROW, 7, first.digest)
        assert again.digest == first.digest
        assert (await at.step("r.1.1", turn("2"), tokens(5))).digest == second.digest

    play(tmp_path, story)


def test_program_has_the_row_and_none_of_our_keys(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("LIGHTRL_KEY", "secret")
    code = """
given = {k: v for k, v in os.environ.items() if k.startswith(("LIGHTRL_", "ANTHROPIC"))}
ask(json.dumps([sys.argv[1:], given, call("/episode"), call("/models")]))
"""

    async def story(at: Programs) -> None:
        seen = (await at.reset("r.1.0", ROW, 7)).messages[0]["content"]
        arguments, given, episode, models = json.loads(seen)
        assert arguments == ["1 + 1?", "3", "{nothing}"]
        assert given.pop("ANTHROPIC_BASE_URL") == at.address
        assert given.pop("ANTHROPIC_API_KEY")
        assert json.loads(given.pop("LIGHTRL_ROW")) == ROW
        assert given == {"LIGHTRL_SEED": "7", "LIGHTRL_MODEL": "model", "LIGHTRL_ARGS": "{}"}
        assert episode == {"row": ROW, "seed": 7, "max_length": 64}
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 64)

    play(tmp_path, story, code)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("sys.exit('no sandbox')", "the program ended with exit status 1: no sandbox"),
        ("{}['x']", "the program ended with exit status 1: KeyError: 'x'"),
        ("os.kill(os.getpid(), 9)", "the program was killed by SIGKILL"),
        ("call('/episode', {'failure': 'no judge', 'done': True}); ask('?')", "no judge"),
    ],
)
def test_program_that_fails_gives_no_score(tmp_path: Path, code: str, line: str):
    async def story(at: Programs) -> None:
        with pytest.raises((EnvironmentRaised, WorkerLost)) as e:
            await at.reset("r.1.0", ROW, 7)
        assert str(e.value) == f"{at._settings.program}: row 4: {line}"

    play(tmp_path, story, code)


def test_program_that_does_not_ask_in_time_is_killed_with_what_it_started(tmp_path: Path):
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"],
                         start_new_session=True)
open("pids", "w").write(f"{os.getpid()} {child.pid}")
import time; time.sleep(1000)
"""

    async def story(at: Programs) -> None:
        with pytest.raises(StepTimedOut, match="row 4: no request within"):
            await at.reset("r.1.0", ROW, 7)
        at.close("r.1.0")

    os.chdir(tmp_path)
    play(tmp_path, story, code, timeout_s=1.5)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_limits_tell_the_program_which_may_still_give_a_reward(tmp_path: Path):
    code = """
ask("?")
told = ask("more")
call("/episode", {"reward": 0.25 if told.startswith("the limits") else 0.0})
sys.exit(3)
"""

    async def story(at: Programs) -> None:
        await at.reset("r.1.0", ROW, 7)
        await at.step("r.1.0", turn("12"), tokens(5))
        over = await at.end("r.1.0", None, None)
        assert (over.done, over.reward) == (True, 0.25)
        await at.reset("r.2.0", ROW, 7)
        over = await at.end("r.2.0", turn("1"), tokens(5, finish="length"))
        assert over.reward == 0.25

    play(tmp_path, story, code)


def test_agents_elsewhere_open_sessions_with_the_environment_key(tmp_path: Path):
    async def story(at: Programs) -> None:
        beginning = asyncio.create_task(at.reset("p7@0#3.1.0", ROW, 7))
        for key, status in ((KEY + "1", 401), ("", 401)):
            assert (await asyncio.to_thread(request, at, "/sessions", key, {}))[0] == status
        status, opened = await asyncio.to_thread(request, at, "/sessions", KEY, {})
        assert (status, opened["row"], opened["seed"]) == (200, ROW, 7)
        key, chat = opened["api_key"], {"model": "m", "messages": [turn("?") | {"role": "user"}]}
        asking = asyncio.create_task(asyncio.to_thread(request, at, "/chat/completions", key, chat))
        assert (await beginning).messages == [{"role": "user", "content": "?"}]
        # its node is lost: the request stays open until the episode is begun again
        at.close("p7@0#3.1.0")
        another = asyncio.create_task(asyncio.to_thread(request, at, "/sessions", KEY, {}))
        digest = (await at.reset("p7@0#3.2.0", ROW, 7, "a digest")).digest
        assert digest == (await beginning).digest
        ending = asyncio.create_task(at.step("p7@0#3.2.0", turn("12"), tokens(5)))
        assert (await asking)[1]["choices"][0]["message"]["content"] == "12"
        report = {"reward": 1, "done": True}
        assert (await asyncio.to_thread(request, at, "/episode", key, report))[0] == 200
        over = await ending
        assert (over.done, over.reward) == (True, 1.0)
        at.close("p7@0#3.2.0", "it failed")
        status, told = await asyncio.to_thread(request, at, "/chat/completions", key, chat)
        assert (status, told["error"]["message"]) == (404, "it failed")
        # nobody else got its session
        other = asyncio.create_task(at.reset("p8@0#0.1.0", ROW, 8))
        assert (await another)[1]["seed"] == 8
        other.cancel()

    play(tmp_path, story, program="", endpoint="127.0.0.1:*")


def test_node_that_stops_tells_agents_elsewhere_to_ask_again(tmp_path: Path):
    async def story(at: Programs) -> None:
        beginning = asyncio.create_task(at.reset("p7@0#3.1.0", ROW, 7))
        key = (await asyncio.to_thread(request, at, "/sessions", KEY, {}))[1]["api_key"]
        chat = {"model": "m", "messages": [turn("?") | {"role": "user"}]}
        asking = asyncio.create_task(asyncio.to_thread(request, at, "/chat/completions", key, chat))
        await beginning
        await at.stop()
        assert (await asking)[0] == 503

    play(tmp_path, story, program="", endpoint="127.0.0.1:*")


def test_program_that_fails_after_a_limit_gives_no_score(tmp_path: Path):
    async def story(at: Programs) -> None:
        await at.reset("r.1.0", ROW, 7)
        with pytest.raises(EnvironmentRaised, match="row 4: no judge"):
            await at.end("r.1.0", None, None)

    play(tmp_path, story, "ask('?'); call('/episode', {'failure': 'no judge'})")


def test_row_that_is_no_argument_fails_alone(tmp_path: Path):
    async def story(at: Programs) -> None:
        for text in ("a\0b", "\ud800"):
            with pytest.raises(EnvironmentRaised, match="row 4: cannot be started: "):
                await at.reset("r.1.0", {**ROW, "question": text}, 7)

    play(tmp_path, story)


def test_program_reaches_the_endpoint_and_no_proxy(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("no_proxy", "corp")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "theirs")
    code = """
names = ("no_proxy", "NO_PROXY", "ANTHROPIC_AUTH_TOKEN")
ask(json.dumps([os.environ.get(name) for name in names] + os.environ["PATH"].split(":")[:1]))
"""

    async def story(at: Programs) -> None:
        seen = json.loads((await at.reset("r.1.0", ROW, 7)).messages[0]["content"])
        assert seen[0] == seen[1]
        assert {"corp", "127.0.0.1"} <= {*seen[0].split(",")}
        assert seen[2:] == [None, str(Path(sys.executable).parent)]

    play(tmp_path, story, code, command=(sys.executable,))


def test_what_cannot_be_started_is_one_line(tmp_path: Path):
    async def story(at: Programs) -> None:
        place = at.address.removeprefix("http://")
        for settings, line in (
            ({"program": "/no/such"}, "environment.program: /no/such: no such program"),
            ({"program": "true", "endpoint": place}, "environment.endpoint: cannot listen at"),
        ):
            other = Programs(
                Environment(**settings), SamplingLimits("m", 9), KEY, "model", tmp_path
            )
            with pytest.raises(EnvironmentUnusable, match=line):
                await other.start()
            await other.stop()

    play(tmp_path, story)
