"""The pool of environments with real worker processes, and classes that misbehave in every way."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.environment import Environment
from lightrl.environments.calls import (
    EnvironmentRaised,
    EnvironmentUnusable,
    Returned,
    StepTimedOut,
    WorkerLost,
)
from lightrl.environments.pool import WorkerPool

LIMIT_S = 100.0  # of a whole scenario; generous, since test machines are slow

# What `step` does is the text of the turn; `reset` does row["do"].
PLAIN = """
import asyncio, os, sys, time

class Plain:
    def __init__(self, greeting="hello"):
        self.greeting, self.turns = greeting, 0

    def reset(self, row, seed):
        if row.get("do"):
            return act(row["do"])
        return f"{self.greeting} {row['index']} {seed}"

    def step(self, text):
        self.turns += 1
        return act(text) if text else ("", None, True)

    def save(self):
        return str(self.turns).encode()

    def load(self, state):
        self.turns = int(state)

def act(text):
    do, _, argument = text.partition(" ")
    match do:
        case "raise":
            raise ValueError("no number in it\\nsecond line")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "hang":
            while True:
                time.sleep(60)
        case "none":
            return None
        case "bytes":
            return b"text"
        case "tuple":
            return ("a", "b")
        case "megabyte":
            return "x" * 1_000_000
        case "huge":
            return "x" * 10_000_000
        case "nan":
            return "x", float("nan"), False
        case "set":
            return [{"role": "user", "content": "x", "extra": {1}}]
        case "surrogate":
            return "half \\ud800"
        case "print":
            print("seen by the log")
        case "chdir":
            os.chdir("/")
        case "where":
            return os.getcwd()
        case "fork":
            os.fork()
        case "close-all":
            os.closerange(3, 100)
        case "run":
            return asyncio.run(later(argument))
        case "order":
            return " ".join({"a", "b", "c", "d", "e", "f"})
        case "dict":
            return {"observation": "next", "reward": 0.5, "metrics": {"a": 1, "b": "text"}}
        case "win":
            return "yes", 1, True
    return f"did {do}"

async def later(text):
    return text
"""

OVERLAPPING = """
import asyncio

waiting = asyncio.Event()

class Overlapping:
    async def reset(self, row, seed):
        return "begin"

    async def step(self, message: dict):
        match message["content"]:
            case "wait":
                await waiting.wait()
            case "wake":
                waiting.set()
            case "hang":
                await asyncio.Event().wait()
            case "exit":
                raise SystemExit(1)
        return "woken", 0.25, False

    async def close(self):
        print("closed")
"""

Scenario = Callable[[WorkerPool], Awaitable[None]]


def turn(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Served:
    """One pool, for the tests of a module: a start takes as long as many calls."""

    def __init__(self, folder: Path, text: str, **settings: Any) -> None:
        name = text.split("class ")[1].partition(":")[0]
        (folder / f"{name.lower()}_environment.py").write_text(text)
        self.reports: list[str] = []
        self.log = folder / "environment-0.log"
        self.loop = asyncio.new_event_loop()
        given = {"workers": 1, "source": f"{folder}/{name.lower()}_environment.py:{name}"}
        environment = Environment(**{**given, **settings})
        self.pool = WorkerPool(environment, folder, self.reports.append)

    def run(self, work: Awaitable[Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(LIMIT_S):
                return await work

        return self.loop.run_until_complete(limited())

    @contextlib.contextmanager
    def started(self) -> Iterator["Served"]:
        try:
            self.run(self.pool.start())
            yield self
        finally:
            self.run(self.pool.stop())
            self.loop.close()

    def play(self, *texts: str, **row: Any) -> list[Returned]:
        """Run an episode with these turns."""

        async def episode() -> list[Returned]:
            found = [await self.pool.reset("e", {"index": 7, **row}, 9)]
            for text in texts:
                found.append(await self.pool.step("e", turn(text)))  # noqa: PERF401
            return found

        return self.run(episode())


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("plain")
    settings = {"timeout_s": 2.0, "args": {"greeting": "hi"}, "resume": "snapshot"}
    with Served(folder, PLAIN, **settings).started() as served:
        yield served


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("overlapping")
    # an interpreter without packages: the worker needs the standard library alone
    settings = {"timeout_s": 0.5, "command": (sys.executable, "-I", "-S")}
    with Served(folder, OVERLAPPING, **settings).started() as served:
        yield served


def test_observations_come_in_all_forms(plain):
    first, asked, judged, won = plain.play("where", "dict", "win")
    assert first.messages == [{"role": "user", "content": "hi 7 9"}]
    assert (first.reward, first.done, first.num_tool_calls) == (None, False, 0)
    assert asked.messages[0]["content"] == os.getcwd()
    assert (judged.reward, judged.metrics, judged.done) == (0.5, {"a": 1.0}, False)
    assert (won.messages[0]["content"], won.reward, won.done) == ("yes", 1.0, True)
    assert all(r.seconds >= 0 for r in (first, asked, judged, won))


def test_digests_are_equal_if_and_only_if_the_observations_are(plain):
    digests = [[r.digest for r in plain.play("a", text)] for text in ("b", "b", "c")]
    assert digests[0] == digests[1]
    assert digests[0][:2] == digests[2][:2]
    assert digests[0][2] != digests[2][2]
    assert all(len(digest) == 32 for digest in digests[0])


def test_an_episode_is_loaded_from_what_save_returned(plain):
    states = [r.state for r in plain.play("a", "b")]
    assert states == [b"9 1 0", b"9 2 1", b"9 3 2"]  # with the seed and the calls so far

    async def scenario() -> Returned:
        await plain.pool.load("other", {}, states[1])
        return await plain.pool.step("other", turn("c"))

    assert plain.run(scenario()).state == b"9 3 2"


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("raise", "{} raised ValueError: no number in it"),
        ("exit", "{} raised SystemExit: 3"),
        ("none", "{} returned None, not text, a list of messages or a dict"),
        ("bytes", "{} returned bytes, not text, a list of messages or a dict"),
        ("tuple", "{} returned a tuple of 2, not text, a list of messages or a dict{}"),
        ("huge", "messages of {}: 9.5 MiB, more than the limit of 1 MiB"),
        ("set", "messages of {}: not JSON: set cannot be written"),
    ],
)
def test_what_is_no_observation_is_one_line_that_names_environment_and_row(plain, does, reason):
    source = plain.pool._named
    for call, row, turns in (("reset", {"do": does}, ()), ("step", {}, (does,))):
        more = " or (observation, reward, done)" if call == "step" else ""
        with pytest.raises(EnvironmentRaised) as raised:
            plain.play(*turns, **row)
        assert str(raised.value) == f"{source}: row 7: {reason.format(call, more)}"
    assert plain.play("a")[1].messages[0]["content"] == "did a"  # the worker goes on


def test_a_reward_is_a_finite_number(plain):
    with pytest.raises(
        EnvironmentRaised, match="row 7: reward of step is nan, not a finite number"
    ):
        plain.play("nan")


def test_user_code_may_print_change_directory_fork_and_use_asyncio(plain):
    texts = ["print", "chdir", "where", "fork", "run fast", "surrogate", "megabyte"]
    found = [r.messages[0]["content"] for r in plain.play(*texts)[1:]]
    assert found == [
        *("did print", "did chdir", os.getcwd(), "did fork", "fast", "half ?"),
        "x" * 1_000_000,
    ]
    log = plain.log.read_text()
    assert "seen by the log" in log
    assert plain.reports == []


@pytest.mark.parametrize("does", ["die", "close-all"])
def test_episodes_of_a_dead_worker_are_lost_and_a_new_one_replays_them(plain, does):
    before = [r.digest for r in plain.play("a", "order")]

    async def scenario() -> None:
        await plain.pool.reset("dies", {"index": 1}, 0)
        await plain.pool.reset("other", {"do": "a"}, 0)
        with pytest.raises(WorkerLost, match="row 1: its worker was lost") as lost:
            await plain.pool.step("dies", turn(does))
        assert lost.value.in_call
        with pytest.raises(WorkerLost, match="episode other: its worker was lost") as lost:
            await plain.pool.step("other", turn("a"))
        assert not lost.value.in_call

    plain.run(scenario())
    assert [r.digest for r in plain.play("a", "order")] == before


def test_a_hanging_call_is_killed_and_those_behind_it_begin_again(plain):
    async def scenario() -> None:
        await plain.pool.reset("hangs", {"index": 1}, 0)
        await plain.pool.reset("waits", {"index": 2}, 0)
        hangs = asyncio.ensure_future(plain.pool.step("hangs", turn("hang")))
        waits = asyncio.ensure_future(plain.pool.step("waits", turn("a")))
        begins = asyncio.ensure_future(plain.pool.reset("begins", {"index": 3}, 0))
        with pytest.raises(StepTimedOut, match=r"row 1: took longer than .*timeout_s = 2 s"):
            await hangs
        with pytest.raises(WorkerLost) as lost:
            await waits
        assert not lost.value.in_call
        assert (await begins).messages[0]["content"] == "hi 3 0"

    began = time.monotonic()
    plain.run(scenario())
    assert time.monotonic() - began >= 2.0


def test_asynchronous_calls_overlap_in_one_worker(overlapping):
    async def scenario() -> None:
        for name in ("a", "b", "c"):
            await overlapping.pool.reset(name, {"index": 0}, 0)
        waits = asyncio.ensure_future(overlapping.pool.step("a", turn("wait")))
        hangs = asyncio.ensure_future(overlapping.pool.step("b", turn("hang")))
        with pytest.raises(EnvironmentRaised, match="step raised SystemExit: 1"):
            await overlapping.pool.step("c", turn("exit"))
        await overlapping.pool.step("c", turn("wake"))
        assert (await waits).reward == 0.25
        with pytest.raises(StepTimedOut, match="row 0"):
            await hangs
        # it was cancelled in its worker, which the others survive
        assert (await overlapping.pool.step("a", turn("wake"))).messages[0]["content"] == "woken"
        overlapping.pool.close("a")
        await overlapping.pool.reset("a", {"index": 0}, 0)
        assert "closed" in overlapping.log.read_text()

    overlapping.run(scenario())
    assert overlapping.reports == []


@pytest.mark.parametrize(
    ("source", "settings", "line"),
    [
        ("class Half:\n    def reset(self): pass", {}, "{}: the class has no method 'step'"),
        (
            "class Broken:\n    1 / 0",
            {},
            "{}: cannot be loaded: ZeroDivisionError: division by zero",
        ),
        (
            "import no_such\nclass Needs: pass",
            {},
            "{}: no module 'no_such' in {}: install it there, "
            "or name another interpreter with environment.command",
        ),
        (
            PLAIN,
            {"args": {"size": 3}},
            "{}: environment.args does not fit: got an unexpected keyword argument 'size'",
        ),
        (PLAIN, {"command": ("/no/python",)}, "environment.command: /no/python: no such program"),
        ("import os\nclass Dies: os._exit(3)", {}, "{}: died 3 times at start: environment-0 ("),
        (
            "class Plain: pass",
            {"source": "gym"},
            "'gym': expected FILE.py:NAME, package.module:NAME, or a name after gym:, ",
        ),
    ],
)
def test_a_source_that_cannot_be_used_is_one_line(tmp_path, source, settings, line):
    served = Served(tmp_path, source, **settings)
    with pytest.raises(EnvironmentUnusable) as raised, served.started():
        pass
    assert str(raised.value).startswith(line.format(served.pool._named, sys.executable))
    assert "\n" not in str(raised.value)


def test_workers_that_keep_dying_without_a_call_are_given_up(tmp_path):
    served = Served(tmp_path, PLAIN)
    [worker] = served.pool._workers

    async def kill_whenever_it_is_ready() -> None:
        for _ in range(3):
            while not worker.is_ready:
                await served.pool._changed.wait()
            worker.is_ready = False
            worker.child.kill()
        await served.pool._changed.wait()
        with pytest.raises(EnvironmentUnusable, match="Plain: environment-0 keeps dying: "):
            await served.pool.reset("e", {"index": 0}, 0)

    with served.started():
        served.run(kill_whenever_it_is_ready())
    again = [line.endswith("; starting it again") for line in served.reports]
    assert again == [True, True, False]
