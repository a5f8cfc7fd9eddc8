"""Environments of `verifiers`: which are taken, how their rubrics score, where their rows go.

A stand-in with the documented names, since the package itself takes seconds to import; whole runs
with it are in test_projects.py.
"""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import schema
from lightrl.config.reward import Reward
from lightrl.config.run_file import parse_config
from lightrl.errors import DataError, RewardError
from lightrl.rewards.base import Columns, RewardFunction, Sample
from lightrl.rewards.rubrics import load_rubric, rows_file
from lightrl.rewards.score import Score, score

STAND_IN = """
import importlib

class Parser:
    def parse_answer(self, completion):
        return completion[-1]["content"].strip()

class Rubric:
    def __init__(self, funcs=None, weights=None):
        self.funcs = funcs or []
        self.weights = weights or [1.0] * len(self.funcs)
        self.class_objects = {"parser": Parser()}

class RubricGroup(Rubric):
    def __init__(self, rubrics):
        super().__init__()
        self.rubrics = rubrics

class MultiTurnEnv:
    def __init__(self, dataset=None, eval_dataset=None, rubric=None, max_turns=10):
        self.dataset, self.eval_dataset = dataset, eval_dataset
        self.rubric, self.max_turns = rubric, max_turns

    def get_dataset(self):
        return self.dataset

    def get_eval_dataset(self):
        return self.eval_dataset

class ToolEnv(MultiTurnEnv):
    pass

class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **kwargs):
        super().__init__(max_turns=1, **kwargs)

def load_environment(env_id):
    return importlib.import_module(env_id.replace("-", "_")).load_environment()
"""
ENVIRONMENT = """
import verifiers as vf

print("loading")

async def similarity(completion, answer, parser, state) -> float:
    state["similarity"] = float(parser.parse_answer(completion) == answer)
    return state["similarity"]

def threshold(state) -> float:
    return 1.0 if state["similarity"] > 0.8 else 0.0

def words(completion, info) -> float:
    return float(len(info["words"]))

def unknown(client) -> float:
    return 1.0

def unique(completions) -> list[float]:
    texts = [c[-1]["content"] for c in completions]
    return [float(texts.count(text) == 1) for text in texts]

def reward(completion) -> float:
    return 0.5

def named(name, value):
    def function(completion) -> float:
        return value
    function.__name__ = name
    return function

ROWS = [
    {"prompt": [{"role": "user", "content": "1+1=", "name": None}], "answer": "2"},
    {"prompt": [{"role": "user", "content": "1+2=", "name": None}], "answer": "3"},
]

def load_environment():
    first = vf.Rubric([similarity, threshold, unknown], [0.0, 1.0, 0.0])
    return vf.SingleTurnEnv(
        dataset=ROWS, eval_dataset=ROWS[:1], rubric=vf.RubricGroup([first, vf.Rubric(%s)])
    )
"""
TOOLS = """
import verifiers as vf

def load_environment():
    return vf.ToolEnv(rubric=vf.Rubric([lambda completion: 0.0]))
"""


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules, first on the path."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "verifiers.py").write_text(STAND_IN)
    (folder / "my_sums.py").write_text(ENVIRONMENT % "[words], [0.5]")
    (folder / "my_group.py").write_text(ENVIRONMENT % "[unique]")
    alike = '[reward, named("score", 1.0), named("same", 2.0), named("same", 4.0)], [0.2, 1, 1, 1]'
    (folder / "my_names.py").write_text(ENVIRONMENT % alike)
    (folder / "my_tools.py").write_text(TOOLS)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("verifiers", "my_sums", "my_group", "my_names", "my_tools"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return folder


def scores(function: RewardFunction, *responses: str, **row: Any) -> list[Score]:
    samples = [Sample("1+1=", text, "2", row, [], "stop") for text in responses]
    return asyncio.run(score([function], [1.0], samples))


def test_a_rubric_is_the_weighted_sum_of_its_functions_in_their_order(environments):
    function = load_rubric("my-sums", Columns(frozenset()))
    assert (function.takes_list, function.is_async) == (False, True)
    right, wrong = scores(function, " 2", "3", info='{"words": ["a", "b"]}')
    assert (right.reward, wrong.reward) == (1.0 + 0.5 * 2, 0.5 * 2)
    assert right.metrics == {"similarity": 1.0, "threshold": 1.0, "words": 2.0}


def test_names_of_functions_change_no_sum(environments):
    [result] = scores(load_rubric("my-names", None), "3")
    assert result.reward == pytest.approx(0.2 * 0.5 + 1.0 + 2.0 + 4.0)
    assert result.metrics == {
        "similarity": 0.0,
        "threshold": 0.0,
        "rubric.reward": 0.5,
        "rubric.score": 1.0,
        "same": 2.0,
        "same-2": 4.0,
    }


def test_a_function_with_a_weight_that_fails_is_no_score(environments):
    [result] = scores(load_rubric("my-sums", None), "2")
    assert (result.reward, result.failure) == (None, "KeyError: 'words'")


def test_a_function_of_the_group_gets_it_whole(environments):
    function = load_rubric("my-group", None)
    assert function.takes_list
    assert [r.reward for r in scores(function, "2", "3", "3")] == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "my-tools",
            "verifiers:my-tools: is a ToolEnv; a prompt has one response, so it must be a "
            "SingleTurnEnv",
        ),
        ("nowhere", "verifiers:nowhere: cannot be loaded: ModuleNotFoundError: No module named"),
    ],
)
def test_what_cannot_be_an_environment_of_one_turn_is_refused(environments, tmp_path, name, reason):
    with pytest.raises(RewardError) as caught:
        load_rubric(name, None)
    assert str(caught.value).startswith(reason)
    with pytest.raises(DataError) as read:
        rows_file(f"verifiers:{name}", "train", Reward(), tmp_path)
    assert str(read.value).startswith(reason)


def test_a_verifiers_without_the_classic_api_says_what_to_install(environments):
    (environments / "verifiers.py").write_text('__version__ = "0.4.0"')
    with pytest.raises(RewardError, match="verifiers has no SingleTurnEnv: pip install"):
        load_rubric("my-sums", None)


def test_its_rows_are_read_in_a_process_of_their_own(environments, tmp_path):
    file = Path(rows_file("verifiers:my-sums", "train", Reward(), tmp_path))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["2", "3"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "1+1="}]
    held_out = rows_file("verifiers:my-sums", "eval", Reward(), tmp_path)
    assert len(Path(held_out).read_text().splitlines()) == 1
    assert "my_sums" not in sys.modules
    assert rows_file("train.jsonl", "train", Reward(), tmp_path) == "train.jsonl"


def test_a_command_that_cannot_be_started_for_its_rows_is_one_line(tmp_path):
    is_no_program = tmp_path / "notes.txt"
    is_no_program.touch(0o644)
    programs = {"nosuchprog": "No such file or directory", str(is_no_program): "Permission denied"}
    for program, reason in programs.items():
        with pytest.raises(DataError) as caught:
            rows_file("verifiers:my-sums", "train", Reward(command=(program,)), tmp_path)
        assert str(caught.value) == f"verifiers:my-sums: {program}: {reason}"


def test_an_environment_brings_its_data_unless_the_config_has_some():
    def path(**sections: Any) -> str:
        tree = {"model": {"path": "m"}, "reward": {"functions": "verifiers:my-sums"}, **sections}
        parsed: schema.Config = parse_config(tree)
        return parsed.data.path

    assert path() == "verifiers:my-sums"
    assert path(data={"max_prompt_length": 8}) == "verifiers:my-sums"
    assert path(data={"path": "train.jsonl"}) == "train.jsonl"
