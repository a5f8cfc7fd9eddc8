"""Sets of prompts in the config: the short form, several of them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from lightrl.config.run_file import load_config, parse_config, to_toml
from lightrl.config.schema import Config
from lightrl.errors import ConfigError

MODEL = {"model": {"path": "org/model"}}


def parse(data: dict[str, Any], **sections: Any) -> Config:
    return parse_config({**MODEL, "data": data, **sections})


def complaint(data: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(data, **sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_data_path_is_short_for_one_set():
    data = parse({"path": "org/gsm8k", "subset": "main", "split": "test", "prompt_key": "q"}).data
    [one] = data.all_sets
    assert (one.name, one.path, one.subset, one.split) == (
        "gsm8k-main",
        "org/gsm8k",
        "main",
        "test",
    )
    assert (one.prompt_key, one.answer_key, one.weight, one.reward) == ("q", "answer", None, ())


def test_sets_have_names_and_take_the_keys_of_the_data_where_they_have_none(tmp_path: Path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "org/model"\n[data]\nanswer_key = "a"\n'
        '[[data.sets]]\npath = "train.parquet"\nweight = 3\nreward = "r.py:f"\n'
        '[[data.sets]]\nname = "code"\npath = "org/code"\nweight = 1\nanswer_key = "tests"\n'
    )
    config = load_config(tmp_path / "run.toml")
    train, code = config.data.all_sets
    assert (train.name, train.path) == ("train", str(tmp_path / "train.parquet"))
    assert (train.answer_key, code.answer_key) == ("a", "tests")
    assert train.reward == (f"{tmp_path}/r.py:f",)
    assert (code.name, code.path, code.weight) == ("code", "org/code", 1.0)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml") == config
    [one] = load_config(tmp_path / "run.toml", ['data.sets=[{path = "b.jsonl"}]']).data.all_sets
    assert one.path == str(Path.cwd() / "b.jsonl")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "data.path: is required, or at least one [[data.sets]]"),
        ({"path": ["a", "b"]}, "data.path = ['a', 'b']: is one path; several are [[data.sets]]"),
        (
            {"path": "a", "sets": [{"path": "b"}]},
            "data.path = 'a': is short for a single set, and there are [[data.sets]]: give it to "
            "one of them",
        ),
        (
            {"sets": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]},
            'data.sets: 2 sets are called "x"; give each a name of its own',
        ),
        (
            {"sets": [{"path": "a", "weight": 1}, {"path": "b"}]},
            "data.sets: b has no weight and others have: give one to all of them, or to none",
        ),
        (
            {"sets": [{"path": "a"}, {"path": "b", "weight": 0}]},
            "data.sets[1].weight = 0: input should be greater than 0",
        ),
        (
            {"sets": [{"path": "a", "wait": 1}]},
            "data.sets[0].wait: unknown key; did you mean data.sets[].weight?",
        ),
        ({"sets": [{"name": "x"}]}, "data.sets[0].path: is required"),
        (
            {"path": "a", "too_long": "cut"},
            "data.too_long = 'cut': input should be 'error' or 'drop'",
        ),
    ],
)
def test_what_is_wrong_with_sets_is_one_line(data, line):
    assert complaint(data) == line


def test_an_empty_stop_string_is_refused():
    assert complaint({"path": "a"}, rollout={"stop": ["x", ""]}) == (
        "rollout.stop = ['x', '']: an empty text is in every text; leave it out"
    )
