"""Responses that are tried as right ones, scored by the built-in functions."""

import pytest

from lightrl.rewards.answers import math_reward
from lightrl.rewards.base import Sample
from lightrl.rewards.builtin import exact_match, regex_reward
from lightrl.rewards.trial import right_responses

CUSTOM = "rewards.py:reward"


def sample(response: str, answer: str) -> Sample:
    return Sample("?", response, answer, {}, [], "stop")


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("72", "72"),
        ("She sold 48+24 = 72.\n#### 72", "72"),
        ("Thus $x = \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
    ],
)
def test_an_answer_is_tried_as_it_is_and_with_all_marks(answer, end):
    plain, marked = right_responses((CUSTOM,), {}, answer)
    assert plain == answer
    for mark in ("</think>", f"Answer: {end}", f"#### {end}", f"<answer>{end}</answer>"):
        assert mark in marked
    assert marked.endswith(f"\\boxed{{{end}}}")


@pytest.mark.parametrize("answer", [None, "", float("nan"), ["4"]])
def test_without_an_answer_there_is_no_right_response(answer):
    assert right_responses((CUSTOM,), {}, answer) == []


def test_exact_match_pays_the_answer():
    [right] = right_responses(("exact_match",), {}, "36,03")
    assert exact_match(sample(right, "36,03")) == 1


@pytest.mark.parametrize("functions", [("judge",), (CUSTOM, "judge"), ("judge", "math")])
def test_a_judge_gets_one(functions):
    assert len(right_responses(functions, {}, "36")) == 1


@pytest.mark.parametrize(
    "pattern",
    [
        "#### (.+)",
        r"####\s*(-?[0-9.,]+)",
        r"\\boxed\{(.*?)\}",
        r"<answer>\s*(\d+)\s*</answer>",
        r"(?i)answer:\s+(\d+)",
        r"(\d+)",
    ],
)
def test_a_pattern_finds_the_answer_in_one_of_them(pattern):
    reward = regex_reward(pattern)
    assert 1 in [reward(sample(r, "72")) for r in right_responses(("regex",), {}, "72")]


def test_math_pays_a_box():
    pytest.importorskip("math_verify")
    [right] = right_responses(("math", "exact_match"), {}, "so #### 1,072")
    assert right == "\\boxed{1072}"
    assert math_reward(sample(right, "so #### 1,072")) == 1


@pytest.mark.parametrize("column", ["code", "solution"])
def test_a_program_that_passes_is_a_column(column):
    row = {column: "def f(): pass"}
    assert right_responses(("code",), row, "[]") == ["```python\ndef f(): pass\n```"]


def test_a_program_in_a_block_stays_there_and_a_row_may_have_none():
    fenced = "So:\n```python\nx\n```"
    assert right_responses(("code",), {"solution": fenced}, None) == [fenced]
    for row in ({}, {"code": ["x"]}):
        assert right_responses(("code",), row, '["assert f()"]') == []
