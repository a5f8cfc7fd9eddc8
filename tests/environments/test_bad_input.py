"""Environments that misbehave in one row each, in a daemon and in a whole run."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightrl.keys import ENVIRONMENT_FILE
from lightrl.messages.episodes import BeginEpisode, EpisodeEnded, Observed, StepEpisode
from lightrl.metrics import sinks
from lightrl.wire import pack_i32
from tests.support.cli import EMULATED, QUICKSTART, arguments
from tests.support.daemons import DEADLINE_S, make_config
from tests.support.scripted_coordinator import ScriptedHead, rollout_daemon

pytestmark = pytest.mark.usefixtures("warm_daemons")

GUESS = QUICKSTART.parents[1] / "guess" / "run.toml"
BAD = """
import os, sys, time

class Bad:
    def __init__(self, does):
        self.does = does

    def reset(self, row, seed):
        self.call, _, self.do = self.does[row["index"]].partition(" ")
        return self.act("?") if self.call == "reset" else "?"

    def step(self, text):
        return self.act(("", 0.5, True)) if self.call == "step" else ("", 0.5, True)

    def act(self, good):
        match self.do:
            case "raise":
                raise ValueError("no such level\\nsecond line")
            case "none":
                return None
            case "bytes":
                return b"?"
            case "megabyte":
                return "?" * 1_000_000
            case "huge":
                return "?" * 10_000_000
            case "sleep":
                while True:
                    time.sleep(60)
            case "exit":
                os._exit(3)
            case "fork":
                os.fork()
            case "print":
                print("x" * 100_000)
                os.write(1, b"y\\n")
            case "chdir":
                os.chdir("/")
        return good
"""
ANSWERS: Any = (Observed, EpisodeEnded)
NO_FORM = ", not text, a list of messages or a dict"
# What an environment does -> how the episode ends, and why it has no score.
DOES = {
    "reset raise": ("failed", "reset raised ValueError: no such level"),
    "reset none": ("failed", f"reset returned None{NO_FORM}"),
    "reset bytes": ("failed", f"reset returned bytes{NO_FORM}"),
    "reset megabyte": ("failed", "the first observation, of 1000000 tokens, does not fit into "),
    "reset huge": ("failed", "messages of reset: 9.5 MiB, more than the limit of 1 MiB"),
    "reset sleep": ("failed", "took longer than environment.timeout_s = 1 s"),
    "reset exit": ("failed", "its worker was lost: environment-0 (pid "),
    "reset chdir": ("done", ""),
    "step raise": ("failed", "step raised ValueError: no such level"),
    "step none": ("failed", f"step returned None{NO_FORM}"),
    "step megabyte": ("context", ""),
    "step sleep": ("timeout", ""),
    "step exit": ("failed", "its worker was lost: environment-0 (pid "),
    "step fork": ("done", ""),
    "step print": ("done", ""),
    "good": ("done", ""),
}
REWARDS = {"failed": None, "context": 0.0, "timeout": 0.0, "done": 0.5}


def written(folder: Path) -> str:
    file = folder / "bad.py"
    file.write_text(BAD)
    return f"{file}:Bad"


def require_ends(source: str, ends: list[tuple[str, str, float | None]]) -> None:
    """One (stop, failure, reward) for each of DOES; a failure names environment and row."""
    for row, (end, (stop, failure)) in enumerate(zip(ends, DOES.values(), strict=True)):
        found = f"{source}: row {row}: {failure}" if failure else ""
        assert (end[0], end[1][: len(found)], end[2]) == (stop, found, REWARDS[stop]), end
        assert bool(end[1]) == bool(failure)
        assert "\n" not in end[1]


def test_each_row_ends_as_it_must_and_the_others_go_on(tmp_path: Path):
    source = written(tmp_path)
    environment = {
        "source": source,
        "args": {"does": list(DOES)},
        "timeout_s": 1,
        "max_length": 80,
    }

    async def scenario():
        head = ScriptedHead(make_config(tmp_path, environment=environment), tmp_path)
        options = ("--slots", "99", "--workers", "1")
        async with (
            head,
            rollout_daemon(head.address, tmp_path / ENVIRONMENT_FILE, *options) as process,
        ):
            await head.hello()
            head.send(head.welcome)
            for k in range(len(DOES)):
                row = json.dumps({"index": k})
                head.send(BeginEpisode(str(k), 1, seed=3, max_tokens=9, row=row))
            ends: dict[int, tuple[str, str, float | None]] = {}
            async with asyncio.timeout(DEADLINE_S):
                while len(ends) < len(DOES):
                    message = await head.expect(ANSWERS)
                    if isinstance(message, Observed):
                        step = StepEpisode(message.response, 1, message.turn, pack_i32([3]), "stop")
                        head.send(step)
                    elif isinstance(message, EpisodeEnded):
                        what = (message.stop, message.failure, message.reward)
                        ends[int(message.response)] = what
            assert process.returncode is None
            require_ends(source, [ends[k] for k in range(len(DOES))])

    asyncio.run(scenario())


@pytest.mark.e2e
def test_run_with_bad_rows_goes_on_and_counts_them(tmp_path: Path):
    source = written(tmp_path)
    num = len(DOES)
    settings = (
        f"environment.source={source}",
        f"environment.args={{does = {json.dumps(list(DOES))}}}",
        f"environment.tasks={num}",
        "environment.timeout_s=1",
        "environment.workers=1",
        "train.steps=2",
        f"train.prompts_per_step={num}",
        "rollout.group_size=2",
        "rollout.nodes=1",
        "rollout.engine_args={mean_length = 2.0}",
        "logging.samples=99",
    )
    done = subprocess.run(
        arguments("up", str(GUESS), "run.name=bad", *EMULATED, *settings, "--no-tui"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 3,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Traceback" not in said
    run = tmp_path / "runs" / "bad"
    for log in (run / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text()
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    ends = {
        int(row["response"].partition("@")[0].partition("/")[2]): row
        for row in rows
        if row["step"] == 0 and row["response"].endswith("#0")
    }
    found = [
        (end["stop"], end.get("failure", ""), end["environment_reward"])
        for _, end in sorted(ends.items())
    ]
    require_ends(source, found)
    figures = sinks.read(run)[-1]
    num_failed = sum(stop == "failed" for stop, _ in DOES.values())
    assert figures["episodes/unscored"] == 2 * num_failed
    assert figures["episodes/ended_timeout"] == figures["episodes/ended_context"] == 2
