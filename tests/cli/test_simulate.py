"""`lightrl simulate`: which nodes are there, and what is refused, in one line and without a
traceback."""

import json
from pathlib import Path

import pytest

from lightrl.cli import main
from tests.support.cli import QUICKSTART

SMALL = ("train.prompts_per_step=8", "rollout.group_size=4", "--steps", "2")
COLOCATED = ("--workload", "rlboost-14b-14k")
ROWS = "0,add,node1\n0,add,node2\n1000,remove,node1\n1000,add,node3\n90000,add,node4\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "p3.csv"
    file.write_text(ROWS)
    return file


def simulate(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["simulate", str(QUICKSTART), *map(str, arguments)])
    return int(end.value.code or 0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert simulate(*arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    return line


def test_a_trace_is_cut_and_sampled(capsys, trace: Path):
    cut = ("--trace", trace, "--trace-from", 1, "--trace-to", 80)
    assert simulate(*SMALL, *cut) == 0
    assert f"on 0 nodes x 128 slots, 2 of {trace} that join and leave" in capsys.readouterr().out
    assert simulate(*SMALL, *cut, "--trace-share", 0.5, "--json") == 0
    figures = json.loads(capsys.readouterr().out)["as configured"]
    assert figures["nodes_lost"] == 0
    assert set(figures["devices"]) == {"spot", "trainer"}
    hours = figures["device_hours"]
    assert 0 < hours["spot"] <= hours["trainer"]  # it was there from the segment's beginning


def test_preemptible_nodes_may_stay(capsys):
    assert simulate(*SMALL, "--nodes", 1, "--preemptible", 3) == 0
    out = capsys.readouterr().out
    assert "on 1 node x 128 slots, 3 preemptible ones" in out
    assert "0 nodes lost" in out


@pytest.mark.parametrize(
    ("workload", "complaint"),
    [
        ("gone", "--workload gone: is not a file, a run or a preset (generic, rollpacker-7b-8k,"),
        ("empty", "--workload empty: is no run directory: it has no config.toml"),
    ],
)
def test_without_a_config_a_workload_that_is_no_run_is_named(
    capsys, tmp_path, monkeypatch, workload, complaint
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--workload", workload])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (1, "")
    [line] = said.err.splitlines()
    assert line.startswith(f"lightrl: {complaint}")


def test_of_a_colocated_trainer_is_said_that_nodes_train_too(capsys):
    assert simulate(*SMALL, *COLOCATED, "--nodes", 2, "--preemptible", 1) == 0
    out = capsys.readouterr().out
    assert "always there sample, then train" in out
    assert simulate(*SMALL, "--nodes", 2) == 0
    assert "then train" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--trace-from", 5, "--trace-to", 4), "from 5 to 4 s has no length"),
        (("--trace-share", 0), "--trace-share 0: above 0, at most 1"),
        ((*COLOCATED, "--nodes", 0), "it needs nodes that are always there"),
    ],
)
def test_a_part_of_a_trace_that_cannot_be_is_refused(
    capsys, trace: Path, options: tuple[object, ...], complaint: str
):
    assert complaint in refusal(capsys, *SMALL, "--trace", trace, *options)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0,add,node-0\n", "node-0: another node has this name"),
        ("0,add,trainer\n", "trainer: another node has this name"),
        ("0,add,preemptible-0\n", "preemptible-0: another node has this name"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(capsys, tmp_path: Path, text: str, complaint: str):
    file = tmp_path / "bad.csv"
    file.write_text(text)
    line = refusal(capsys, *SMALL, "--nodes", 1, "--preemptible", 1, "--trace", file)
    assert str(file) in line
    assert complaint in line


@pytest.mark.parametrize("option", ["share", "from", "to"])
def test_a_part_of_no_trace_is_refused(capsys, option: str):
    line = refusal(capsys, *SMALL, "--nodes", 1, f"--trace-{option}", 0.5)
    assert f"--trace-{option} takes a part of a trace: --trace FILE is missing" in line
