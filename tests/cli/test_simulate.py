"""`lightrl simulate`: which nodes are there, and what is refused, in one line and without a
traceback."""

import json
from pathlib import Path

import pytest

from lightrl.cli import main
from tests.support.cli import QUICKSTART

SMALL = ("train.prompts_per_step=8", "rollout.group_size=4", "--steps", "2")
LARGER = (*SMALL[:2], "--steps", "3", "--nodes", "2")
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


def test_a_config_is_simulated(capsys):
    assert simulate(*LARGER) == 0
    out = capsys.readouterr().out
    assert (
        "3 steps of 8 prompts x 4 = 32 responses of at most 105 tokens, on 2 nodes x 128 slots"
        in out
    )
    assert "note       nothing is known of this model" in out
    assert "x the synchronous baseline" in out
    assert "decode" in out
    assert max(map(len, out.splitlines())) <= 110


def test_all_mechanisms_in_one_table(capsys):
    assert simulate(*LARGER, "--compare") == 0
    out = capsys.readouterr().out
    for row in (
        "synchronous",
        "migration",
        "tail: prompts",
        "tail: both",
        "staleness 1",
        "as configured",
    ):
        assert f"\n {row} " in out


def test_json_is_the_last_line_and_whole(capsys, tmp_path: Path):
    trace = tmp_path / "spot.csv"
    trace.write_text("0,add,a\n0,add,b\n900,remove,a\n3000,add,a\n")
    workload = tmp_path / "w.json"
    workload.write_text('{"prices": {"node": 3.0, "trainer": 12.0}, "engine": {"step_s": 0.02}}')
    assert simulate(*LARGER[:4], "--trace", trace, "--workload", workload, "--json") == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["as configured"]
    assert figures["steps"] == 3
    assert figures["nodes_lost"] == 1
    assert figures["cost"] > 0
    for shares in figures["devices"].values():
        assert sum(shares.values()) == pytest.approx(1.0)


def test_nodes_cost_what_the_config_says_else_what_the_workload_says(capsys, tmp_path: Path):
    workload = tmp_path / "w.json"
    workload.write_text('{"prices": {"node": 5.0, "trainer": 50.0, "spot": 1.0}}')
    prices = ("prices.reserved_per_hour=8", "prices.preemptible_per_hour=2")
    for mine, (node, trainer, spot) in (((), (5, 50, 1)), (prices, (8, 8, 2))):
        options = (*LARGER, "--preemptible", "1", "--workload", workload, "--json", *mine)
        assert simulate(*options) == 0
        figures = json.loads(capsys.readouterr().out)["as configured"]
        hours = figures["device_hours"]
        cost = node * hours["rollout"] + trainer * hours["trainer"] + spot * hours["spot"]
        assert figures["cost"] == pytest.approx(cost)


def test_rules_by_which_devices_change_sides_are_compared(capsys, tmp_path):
    workload, trace = tmp_path / "shared.json", tmp_path / "spot.csv"
    workload.write_text('{"training": {"placement": "colocated", "token_s": 0.002}}')
    trace.write_text("0,add,a\n0,add,b\n")
    step_s: dict[str, float] = {}
    for rule in ("off", "foreseen", "window"):
        options = (*LARGER, "--workload", workload, "--trace", trace, "--offload", rule)
        assert simulate(*options, "--json") == 0
        step_s[rule] = json.loads(capsys.readouterr().out)["as configured"]["step_s"]
    assert max(step_s["foreseen"], step_s["window"]) < step_s["off"]


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
        ("gone", "--workload gone: neither a file, a run nor a preset (generic, rollpacker-7b-8k,"),
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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ("--workload", "nowhere"),
            "neither a file, a run nor a preset (generic, rollpacker-7b-8k",
        ),
        (("--nodes", "0"), "a simulation needs nodes"),
        (("--offload", "window"), "--offload window: the trainer of this workload has its own"),
        (("--trace", "none.csv"), "none.csv: cannot be read: No such file or directory"),
        (("rollout.slotz=3",), "rollout.slotz: unknown key; did you mean rollout.slots?"),
        (
            ("--workload", "rollpacker-7b-8k", "async.max_staleness=1"),
            "async.max_staleness: a trainer on the rollout nodes cannot work beside them",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments: tuple[str, ...], complaint: str):
    assert simulate(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert complaint in line
