"""Signatures, answers and the weighted sum, in this process: only functions of our own run here."""

import asyncio
import math
import sys
from typing import Any

import pytest

from lightrl.errors import RewardError
from lightrl.rewards.base import Sample, import_function, read_answer, score, wrap
from lightrl.rewards.builtin import exact_match, load_function

SAMPLE = Sample(
    "1+1=",
    " 2 ",
    answer="2",
    row={
        "prompt": "1+1=",
        "answer": "2",
        "data_source": "sums",
        "extra_info": {"index": 7},
        "level": 3,
    },
    response_ids=[4, 1],
    finish_reason="stop",
)


def call(function: Any, sample: Sample = SAMPLE) -> Any:
    wrapped = wrap(function, "rewards.py:f")
    result = asyncio.run(score([wrapped], [1.0], sample))
    return result.reward


def test_a_native_function_gets_the_sample():
    assert call(lambda sample: float(sample.response.strip() == sample.answer)) == 1.0


def test_a_file_imports_its_neighbours_and_from_where_the_run_was_started(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "a_neighbour.py").write_text("HALF = 0.5")
    (tmp_path / "a_project").mkdir()
    (tmp_path / "a_project" / "grading.py").write_text("QUARTER = 0.25")
    (tmp_path / "rewards" / "ours.py").write_text(
        "from a_neighbour import HALF\nfrom a_project.grading import QUARTER\n"
        "def f(sample):\n    return HALF + QUARTER\n"
    )
    assert call(import_function(f"{tmp_path}/rewards/ours.py:f")) == 0.75


def test_verls_signature_is_recognised_by_its_names():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, solution_str, ground_truth, extra_info) == (
            "sums",
            " 2 ",
            "2",
            {"index": 7},
        )
        return {"score": 0.5, "acc": True, "pred": "2"}

    assert call(compute_score) == 0.5


def test_verls_signature_without_its_optional_parts():
    def compute_score(solution_str, ground_truth):
        return len(solution_str + ground_truth)

    assert call(compute_score) == 4.0


def test_trls_signature_gets_a_batch_of_one():
    def f(prompts, completions, level, **columns):
        assert (prompts, completions, level) == (["1+1="], [" 2 "], [3])
        assert columns["answer"] == ["2"]
        assert columns["completion_ids"] == [[4, 1]]
        assert "prompt" not in columns
        return [0.25]

    assert call(f) == 0.25


def test_trls_signature_gets_messages_where_the_prompt_is_messages():
    chat = [{"role": "user", "content": "1+1="}]
    sample = Sample("<user>1+1=", "2", "2", {"prompt": chat}, [4], "stop")

    def f(completions, prompts=None):
        assert prompts == [chat]
        assert completions == [[{"role": "assistant", "content": "2"}]]
        return [None]

    assert call(f, sample) is None


def test_an_asynchronous_function_is_awaited():
    async def reward(sample):
        await asyncio.sleep(0)
        return 2

    class Judge:
        async def __call__(self, sample):
            return 3

    assert wrap(reward, "f").is_async
    assert wrap(Judge(), "f").is_async
    assert call(reward) == 2.0
    assert call(Judge()) == 3.0


@pytest.mark.parametrize(
    "function",
    [lambda: 0, lambda text: 0, lambda sample, other: 0, lambda *args: 0, lambda **kwargs: 0],
)
def test_an_unknown_signature_is_refused_with_those_that_are_known(function):
    with pytest.raises(
        RewardError, match=r"rewards.py:f\(.*unknown signature; expected reward\(sample\)"
    ):
        wrap(function, "rewards.py:f")


@pytest.mark.parametrize(
    ("answer", "reward", "metrics"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (None, None, {}),
        ([0.5], 0.5, {}),
        ({"reward": 1, "steps": 4, "note": "good"}, 1.0, {"steps": 4.0}),
        ({"score": 0, "acc": False}, 0.0, {"acc": 0.0}),
        ({"reward": 1, "score": 7}, 1.0, {"score": 7.0}),
        ({"reward": None, "acc": math.nan}, None, {}),
    ],
)
def test_answers_that_are_scores(answer, reward, metrics):
    assert read_answer(answer) == (reward, metrics)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (math.nan, "nan, which is not finite"),
        (math.inf, "inf, which is not finite"),
        ({"reward": -math.inf}, "-inf, which is not finite"),
        ("1.0", "returned str, not a number"),
        ([1.0, 2.0], "returned list"),
        ({"acc": 1.0}, 'no "reward" or "score"; its keys are acc'),
    ],
)
def test_answers_that_are_not_scores(answer, reason):
    with pytest.raises(RewardError, match=reason):
        read_answer(answer)


def test_several_functions_are_summed_by_weight_and_none_is_left_out():
    def right(sample):
        return 1.0

    def style(sample):
        return {"reward": 0.5, "commas": 2}

    def silent(sample):
        return None

    functions = [wrap(f, f.__name__) for f in (right, style, silent)]
    result = asyncio.run(score(functions, [1.0, 0.2, 5.0], SAMPLE))
    assert result.reward == pytest.approx(1.1)
    assert result.metrics == {"right": 1.0, "style": 0.5, "style/commas": 2.0}
    assert asyncio.run(score(functions[2:], [1.0], SAMPLE)).reward is None


@pytest.mark.parametrize(
    ("response", "answer", "finish_reason", "reward"),
    [
        (" 2\n", "2", "stop", 1.0),
        ("2", 2, "stop", 1.0),
        ("2", "2", "length", 0.0),
        ("2 ", "3", "stop", 0.0),
        ("", None, "stop", None),
    ],
)
def test_exact_match(response, answer, finish_reason, reward):
    assert exact_match(Sample("", response, answer, {}, [], finish_reason)) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so it is \\boxed{1/2}", "\\frac{1}{2}", 1.0),
        ("The answer is 1,234.", "long text\n#### 1,234", 1.0),
        ("it is $x^2+1$", "$1+x^2$", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("", "4", 0.0),
        ("4", None, None),
    ],
)
def test_math(response, answer, reward):
    pytest.importorskip("math_verify")
    assert call(load_function("math").call, Sample("", response, answer, {}, [], "stop")) == reward


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("exact_macth", "'exact_macth': no such reward; did you mean exact_match"),
        ("zzz", "'zzz': no such reward; built-in are exact_match, math"),
        ("nowhere.py:f", "nowhere.py:f: no such file"),
        ("module:f", 'expected a built-in name or "path.py:function"'),
    ],
)
def test_a_reference_that_leads_nowhere(reference, reason):
    with pytest.raises(RewardError, match=reason):
        load_function(reference)
