"""`lightrl simulate` as a user meets it."""

import json
from pathlib import Path

import pytest

from lightrl.cli import main

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
SMALL = ("train.prompts_per_step=8", "rollout.group_size=4", "--steps", "3", "--nodes", "2")


def simulate(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *map(str, arguments)])
    return int(end.value.code or 0)


def test_a_config_is_simulated(capsys):
    assert simulate(QUICKSTART, *SMALL) == 0
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
    assert simulate(QUICKSTART, *SMALL, "--compare") == 0
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
    assert simulate(QUICKSTART, *SMALL[:4], "--trace", trace, "--workload", workload, "--json") == 0
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
        options = (*SMALL, "--preemptible", "1", "--workload", workload, "--json", *mine)
        assert simulate(QUICKSTART, *options) == 0
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
        options = (*SMALL, "--workload", workload, "--trace", trace, "--offload", rule)
        assert simulate(QUICKSTART, *options, "--json") == 0
        step_s[rule] = json.loads(capsys.readouterr().out)["as configured"]["step_s"]
    assert max(step_s["foreseen"], step_s["window"]) < step_s["off"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ("--workload", "nowhere"),
            "is not a file, a run or a preset (generic, rollpacker-7b-8k",
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
    assert simulate(QUICKSTART, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert complaint in line
