"""`lightrl compare` on run directories as runs leave them."""

import io
import json

import pytest
from rich.console import Console

from lightrl.errors import ConfigError
from lightrl.launch.compare import (
    as_json,
    as_table,
    differences,
    result_of,
    with_distinct_names,
)


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


def test_each_set_of_an_evaluation_has_its_rows(tmp_path):
    first, second = (a_run(tmp_path / name, 1e-6, [0.5]) for name in ("first", "second"))
    with (second / "metrics.jsonl").open("a") as f:
        for step, (math, code) in enumerate([(0.25, 0.75), (0.5, 1.0)]):
            figures = {"eval/math/avg@4": math, "eval/math/pass@4": 2 * math, "eval/math/length": 9}
            figures |= {"eval/math/aime/avg@4": 0.0, "eval/code/avg@1": code, "eval/code/pass@1": 0}
            f.write(json.dumps({"step": step + 5, **figures}) + "\n")
    figures = json.loads(as_json([result_of(first), result_of(second)]))["figures"]
    assert figures["evaluation, last"] == [0.5, 0.75]
    assert figures["eval/math/avg@4, first"] == [None, 0.25]
    assert figures["eval/math/pass@4, last"] == [None, 1.0]
    assert figures["eval/code/avg@1, last"] == [None, 1.0]
    assert not any("aime" in name or "length, " in name for name in figures)
    printed = io.StringIO()
    Console(file=printed, width=100).print(as_table([result_of(first), result_of(second)]))
    assert "eval/math/pass@4, last" in printed.getvalue()


def test_runs_of_one_name_are_told_apart_by_their_path(tmp_path):
    places = ("a/runs/run", "b/runs/run", "b/other", "a/other")
    folders = [tmp_path / place for place in places]
    for folder in folders:
        folder.parent.mkdir(parents=True, exist_ok=True)
    runs = [result_of(a_run(folder, 1e-6, [0.5])) for folder in folders]
    named = [run.name for run in with_distinct_names(runs[:3], folders[:3])]
    assert named == [f"{tmp_path}/a/runs/run", f"{tmp_path}/b/runs/run", "other"]
    same = [folders[0], folders[0]]
    assert len(with_distinct_names([runs[0]] * 2, same)) == 2  # a run beside itself


def test_long_names_and_values_are_never_cut_off(tmp_path):
    names = [f"a-long-name-of-an-experiment-with-many-words-in-it-{k}" for k in (1, 2)]
    runs = [result_of(a_run(tmp_path / name, 10.0**-k, [0.5])) for k, name in enumerate(names)]
    paths = [f"/data/of/somebody/in/a/deep/folder/{'x' * 30}/{k}.parquet" for k in (1, 2)]
    for run, path in zip(runs, paths, strict=True):
        run.settings["data.path"] = path
    printed = io.StringIO()
    Console(file=printed, width=60).print(as_table(runs))
    text = printed.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    # what tells names and values apart is the end of each
    first = "".join(line[20:40].strip() for line in text.splitlines())
    second = "".join(line[40:].strip() for line in text.splitlines())
    for k, column in enumerate((first, second)):
        assert names[k][-3:] in column
        assert paths[k][-9:] in column


def test_values_that_look_like_markup_are_shown_as_they_are(tmp_path):
    runs = [result_of(a_run(tmp_path / name, 1.0, [0.5])) for name in ("[b]one", "two")]
    for run, prompt in zip(runs, ("[INST] x [/INST]", "[a-z]+ :smile:"), strict=True):
        run.settings["data.system_prompt"] = prompt
    printed = io.StringIO()
    Console(file=printed, width=120).print(as_table(runs))
    for text in ("[b]one", "[INST] x [/INST]", "[a-z]+ :smile:"):
        assert text in printed.getvalue()


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no run directory"):
        result_of(tmp_path)
