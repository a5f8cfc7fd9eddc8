"""Files of reward functions: how they are imported, and what in them can be one."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.errors import RewardError
from lightrl.rewards.base import Sample
from lightrl.rewards.builtin import load_function
from lightrl.rewards.load import import_function
from lightrl.rewards.score import score

SAMPLE = Sample("1+1=", "2", "2", {"prompt": "1+1=", "answer": "2"}, [4], "stop")


@pytest.fixture(autouse=True)
def modules(monkeypatch, tmp_path):
    """Those of a worker, which imports the files of one run."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def reward_of(reference: str) -> Any:
    [result] = asyncio.run(score([load_function(reference)], [1.0], [SAMPLE]))
    return result.failure or result.reward


def test_a_file_imports_its_neighbours_and_from_where_the_run_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rewards", a_neighbour="HALF = 0.5")
    write(tmp_path / "a_project", grading="QUARTER = 0.25")
    source = (
        "from a_neighbour import HALF\nfrom a_project.grading import QUARTER\n"
        "def f(sample):\n    return HALF + QUARTER\n"
    )
    write(tmp_path / "rewards", ours=source)
    assert reward_of(f"{tmp_path}/rewards/ours.py:f") == 0.75


def test_a_file_of_a_package_imports_its_siblings(tmp_path):
    top, below = tmp_path / "src" / "some_r1", tmp_path / "src" / "some_r1" / "utils"
    write(below, __init__="from .providers import HALF", providers="HALF = 0.5")
    source = (
        "from some_r1.utils.providers import HALF as SAME\n"
        "def f(sample):\n    from .utils import HALF\n    return HALF + SAME\n"
    )
    write(top, __init__="", rewards=source)
    assert reward_of(f"{top}/rewards.py:f") == 1.0


def test_dots_reach_siblings_without_a_package_file_and_from_a_package_itself(tmp_path):
    write(
        tmp_path / "loose", more="ONE = 1", one="from .more import ONE\ndef f(sample): return ONE"
    )
    assert reward_of(f"{tmp_path}/loose/one.py:f") == 1
    write(tmp_path / "prime", grader="TWO = 2")
    write(tmp_path / "prime", __init__="from . import grader\ndef f(sample): return grader.TWO")
    assert reward_of(f"{tmp_path}/prime/__init__.py:f") == 2


def test_a_package_that_needs_more_than_its_member_does_is_left_out(tmp_path):
    write(tmp_path / "verl_like", __init__="import not_installed")
    write(tmp_path / "verl_like" / "reward_score", __init__="", near="THREE = 3")
    source = "from .near import THREE\ndef f(sample): return THREE"
    write(tmp_path / "verl_like" / "reward_score", batch=source)
    assert reward_of(f"{tmp_path}/verl_like/reward_score/batch.py:f") == 3


@pytest.mark.parametrize("place", ["one", "a_pack/__init__", "a_pack/two"])
def test_a_file_that_lacks_an_import_says_it_each_time(tmp_path, place):
    source = "import not_installed\ndef f(sample): return 1"
    write(tmp_path, one=source)
    write(
        tmp_path / "a_pack",
        __init__=f"from . import two\n{source}",
        two=f"from . import *\n{source}",
    )
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="'not_installed'"):
            import_function(f"{tmp_path}/{place}.py:f")


def test_a_package_whose_name_is_taken_is_said(tmp_path):
    write(
        tmp_path / "json", __init__="", more="", one="from .more import *\ndef f(sample): return 1"
    )
    with pytest.raises(RewardError, match=r"its package 'json', but that name is taken by "):
        import_function(f"{tmp_path}/json/one.py:f")


@pytest.mark.parametrize("file", ["keeps", "json"])  # a name of its own, and one that is taken
def test_functions_of_a_file_share_what_it_keeps(tmp_path, file):
    source = "seen = []\ndef f(sample):\n    seen.append(1)\n    return len(seen)\ng = f\n"
    write(tmp_path, **{file: source})
    assert [reward_of(f"{tmp_path}/{file}.py:{name}") for name in "fg"] == [1, 2]


def test_a_file_never_takes_the_place_of_another_module(tmp_path):
    write(tmp_path / "a", math="def f(sample): return 1", again="def f(sample): return 2")
    write(tmp_path / "b", again="def f(sample): return 3")
    files = ("a/math", "a/again", "b/again")
    assert [reward_of(f"{tmp_path}/{file}.py:f") for file in files] == [1, 2, 3]
    import math

    assert math.floor(1.5) == 1


def test_files_of_a_package_never_take_the_place_of_what_is_installed(tmp_path):
    folder = tmp_path / "reward_score"
    source = "import near\ndef f(sample):\n    import mailbox\n    return bool(mailbox.Maildir)"
    write(folder, __init__="", mailbox="", near="", gsm8k=source)
    assert reward_of(f"{folder}/gsm8k.py:f") == 1


def test_a_file_may_be_called_after_what_it_imports(tmp_path):
    source = "from xml.dom import minidom\nimport near\ndef f(sample): return minidom and near.ONE"
    write(tmp_path, xml=source, near="ONE = 1")
    assert reward_of(f"{tmp_path}/xml.py:f") == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (
            "import functools\ndef g(weight, sample): return weight\nf = functools.partial(g, 3)",
            "f",
        ),
        (
            "import functools\ndef g(completions, weight, **kwargs): return [weight]\n"
            "f = functools.update_wrapper(functools.partial(g, weight=3), g)",
            "g",
        ),
        ("class F:\n    def __call__(self, completions, **kwargs): return [3]\nf = F()", "f"),
        ("class f:\n    def __call__(self, solution_str, ground_truth): return 3", "f"),
        ("class f:\n    async def __call__(self, completions, answer): return [3]", "f"),
        ("class B:\n    def __call__(self, sample): return 3\nclass f(B): pass", "f"),
    ],
)
def test_what_can_be_called_is_a_function_with_the_name_that_it_has_in_its_file(
    tmp_path, source, name
):
    write(tmp_path, callables=source)
    reference = f"{tmp_path}/callables.py:f"
    assert reward_of(reference) == 3
    assert load_function(reference).name == name


def test_a_class_that_cannot_be_made_is_said_with_what_it_needs(tmp_path):
    write(
        tmp_path, classes="class F:\n    def __init__(self, x): pass\n    def __call__(self): pass"
    )
    with pytest.raises(RewardError, match=r"F: is a class that needs arguments: .*'x'"):
        import_function(f"{tmp_path}/classes.py:F")
    write(tmp_path, others="class F: pass\ndef g(): pass")
    with pytest.raises(RewardError, match=r"no such function; others\.py defines g"):
        import_function(f"{tmp_path}/others.py:F")
