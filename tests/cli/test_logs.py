"""`logging.level` and `logging.json` of a run, from outside: all processes write as they say."""

import json
import signal
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from lightrl import log
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    SMALL,
    arguments,
    joining,
    running,
    until,
)

pytestmark = pytest.mark.usefixtures("warm_runs")
REWARD = """
import sys

calls = []

def printing(sample):
    print("one", "two")
    print("to stderr", file=sys.stderr)
    calls.append(sample)
    if len(calls) == 1:  # a run without any score would fail
        raise ValueError("no number in it")
    return 1.0
"""


def logs(tmp_path: Path) -> dict[str, list[str]]:
    folder = tmp_path / "runs" / "one" / "logs"
    return {file.name: file.read_text().splitlines() for file in folder.iterdir()}


def finished(tmp_path: Path, *overrides: str) -> str:
    """What `lightrl up` prints of a run of two steps."""
    with running(tmp_path, *EMULATED, "train.steps=2", *overrides) as run:
        out, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, out
    return out


def test_every_line_of_every_process_is_json_and_says_who_wrote_it(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    bad = ("reward.functions=reward.py:printing", "reward.on_failure=0")
    out = finished(tmp_path, "logging.json=true", "logging.level=debug", *bad)
    assert "finished 2 steps" in out  # for the person who started it
    assert "WARNING: rewards: train: a right response gets 1, no more than an empty one" in out
    assert not [line for line in out.splitlines() if line.startswith("{")]
    written = logs(tmp_path)
    who = {}
    for name, lines in written.items():
        records = [json.loads(line) for line in lines]
        who[name] = {(r["role"], r["node"]) for r in records}
        for r in records:
            assert datetime.fromisoformat(r["time"]).utcoffset() is not None
            assert r["level"] in {"debug", "info", "warning"}
            assert r["message"]
    assert who.pop("launcher.log")
    assert who == {
        "head.log": {("coordinator", "head")},
        "reward-0.log": {("reward", "head")},
        "trainer-0.log": {("trainer", "trainer-0")},
        "rank-0.log": {("rank", "trainer-0")},
        "rollout-0.log": {("rollout", "rollout-0")},
        "rollout-0-engine.log": {("engine", "rollout-0")},
    }
    of_reward = [json.loads(line) for line in written["reward-0.log"]]
    assert {"one two", "to stderr"} <= {r["message"] for r in of_reward}
    assert any(r.get("exception", "").endswith("ValueError: no number in it") for r in of_reward)


@pytest.mark.e2e
def test_a_level_silences_what_is_usual_in_all_processes(tmp_path):
    out = finished(tmp_path, "logging.level=warning", "reward.functions=exact_match")
    assert "finished 2 steps" in out
    assert "step     2/2" in out
    levels = {log.parse(line).level for lines in logs(tmp_path).values() for line in lines}
    assert levels <= {"warning"}


@pytest.mark.e2e
def test_without_settings_a_log_is_for_people(tmp_path):
    finished(tmp_path)
    written = logs(tmp_path)
    steps = [line for line in written["head.log"] if "step 2: " in line]
    assert [log.parse(line).level for line in steps] == ["info"]
    assert " INFO coordinator head: step 2: " in steps[0]
    levels = {log.parse(line).level for lines in written.values() for line in lines}
    # All lines are ours; tokens are arbitrary, so no step learns anything.
    assert levels == {"info", "warning"}


@pytest.mark.e2e
@pytest.mark.parametrize("as_json", ["true", "false"])
def test_why_a_daemon_ended_is_told_without_the_form_of_its_log(tmp_path, as_json):
    """By the launcher, which reads it there."""
    wrong = ("rollout.engine_args={no_such=1}", f"logging.json={as_json}")
    with running(tmp_path, *EMULATED, *wrong) as run:
        out, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 1
    last = out.splitlines()[-1]
    assert "-0 failed: " in last
    assert "engine_args.no_such = 1: known are " in last
    assert '"' not in last
    assert " ERROR " not in last


@pytest.mark.e2e
def test_a_node_from_elsewhere_writes_as_the_run_does_once_it_is_welcome(tmp_path):
    config = ("run.name=one", *SMALL, *EMULATED, "rollout.nodes=0", "train.steps=100000")
    command = arguments("up", str(QUICKSTART), *config, "logging.json=true")
    roles = ("--role", "coordinator,trainer", "--name", "reserved")
    with subprocess.Popen(
        [*command, *roles], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as head:
        try:
            said = until(head, "--join ")
            text = [json.loads(line)["message"] for line in said][-1]
            with (tmp_path / "out").open("w") as out:
                node = subprocess.Popen(
                    arguments(*joining([text]), "--name", "spot"),
                    cwd=tmp_path,
                    stdout=out,
                    stderr=out,
                )
            try:
                said += until(head, "step 3: ")
            finally:
                node.send_signal(signal.SIGTERM)
                assert node.wait(DEADLINE_S) == 0
        finally:
            head.kill()
    assert {json.loads(line)["role"] for line in said} == {"coordinator,trainer"}
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    who = {(r["role"], r["node"]) for r in records}
    assert ("rollout", "spot") in who <= {("rollout", "spot"), ("engine", "spot")}
