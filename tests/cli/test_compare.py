"""`lightrl compare` on run directories as runs leave them."""

import io
import json

import pytest
from rich.console import Console

from lightrl.errors import ConfigError
from lightrl.launch.compare import as_json, as_table, differences, result_of


def a_run(folder, lr, rewards, state="finished"):
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'[run]\nname = "{folder.name}"\n[train.optim]\nlr = {lr}\n[model]\npath = "m"\n'
    )
    with (folder / "metrics.jsonl").open("w") as f:
        f.write(json.dumps({"step": 0, "eval/x/avg@1": 0.25}) + "\n")
        for step, reward in enumerate(rewards, 1):
            record = {"step": step, "reward/mean": reward, "timing_s/step": 2.0 * step}
            f.write(json.dumps(record) + "\n")
        f.write(json.dumps({"step": len(rewards), "eval/x/avg@1": rewards[-1]}) + "\n")
    if state:
        (folder / "summary.json").write_text(json.dumps({"state": state, "rollout_tokens": 1000}))
    return folder


@pytest.fixture
def runs(tmp_path):
    first = a_run(tmp_path / "first", 1e-6, [0.25, 0.75, 0.5])
    return [result_of(first), result_of(a_run(tmp_path / "second", 2e-6, [1.0], state=""))]


def test_only_what_differs_is_said(runs):
    assert differences(runs) == {"train.optim.lr": [1e-6, 2e-6]}


def test_what_came_of_each_stands_side_by_side(runs):
    told = json.loads(as_json(runs))
    assert told["runs"] == ["first", "second"]
    figures = told["figures"]
    assert figures["state"] == ["finished", "not over"]
    assert figures["reward/mean"] == [0.5, 1.0]
    assert figures["seconds"] == [12.0, 2.0]
    assert figures["seconds of a step, median"] == [4.0, 2.0]
    assert figures["evaluation, first"] == [0.25, 0.25]
    assert figures["evaluation, best"] == [0.5, 1.0]
    assert figures["rollout tokens"] == [1000, None]
    printed = io.StringIO()
    Console(file=printed, width=100).print(as_table(runs))
    text = printed.getvalue()
    assert "train.optim.lr" in text
    assert "1e-06" in text


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no run directory"):
        result_of(tmp_path)
