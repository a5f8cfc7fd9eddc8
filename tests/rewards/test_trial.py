"""Which responses are tried as right and wrong ones, held against the built-in functions."""

import pytest

from lightrl.rewards.base import Sample
from lightrl.rewards.builtin import exact_match, regex_reward
from lightrl.rewards.trial import WRONG_ANSWER, WRONG_PROGRAM, pairs_of

CUSTOM = "rewards.py:reward"


def made(*answers, function=CUSTOM, row=()) -> list[tuple[str, ...]]:
    return list(pairs_of((function,), dict(row), answers))


def sample(response: str, answer: str) -> Sample:
    return Sample("?", response, answer, {}, [], "stop")


def test_an_answer_is_tried_as_it_stands_and_with_all_marks():
    plain, (right, wrong) = made("72", "72", "10")
    assert plain == ("72", "10")
    for mark in ("</think>", "Answer: 72", "#### 72", "<answer>72</answer>"):
        assert mark in right
    assert right.endswith("\\boxed{72}")
    assert wrong == right.replace("72", "10")


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("She sold 48+24 = 72.\n#### 72", "72"),
        ("Thus $x = \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
    ],
)
def test_of_an_answer_with_its_derivation_the_end_is_marked(answer, end):
    [plain, (right, wrong)] = made(answer, "#### 7")
    assert plain == (answer, "#### 7")
    assert right.endswith(f"\\boxed{{{end}}}")
    assert wrong.endswith("\\boxed{7}")


def test_the_answer_of_another_row_is_no_wrong_one_if_it_ends_alike():
    found = made("so #### 4", "thus #### 4", "#### 5", function="exact_match")
    assert found == [("so #### 4", "#### 5")]


def test_a_wrong_response_without_another_answer():
    assert made("19", None, "19", function="judge") == [("19", WRONG_ANSWER)]


@pytest.mark.parametrize("answer", [None, ""])
def test_without_an_answer_only_a_wrong_response_is_tried(answer):
    assert made(answer, "4") == [(WRONG_ANSWER,)]


def test_exact_match_pays_the_answer():
    [(right, wrong)] = made("36,03", "40", function="exact_match")
    assert exact_match(sample(right, "36,03")) == 1
    assert exact_match(sample(wrong, "36,03")) == 0


@pytest.mark.parametrize("functions", [("judge",), (CUSTOM, "judge"), ("judge", "math")])
def test_a_judge_gets_one_pair(functions):
    assert len(pairs_of(functions, {}, ("36", "40"))) == 1


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
def test_a_pattern_finds_the_answer_in_one_of_the_pairs(pattern):
    reward = regex_reward(pattern)
    scores = [
        [reward(sample(response, "72")) for response in pair]
        for pair in made("72", "10", function="regex")
    ]
    assert [1, 0] in scores


def test_math_pays_a_box():
    math = pytest.importorskip("lightrl.rewards.math")
    [(right, wrong)] = made("so #### 1,072", "#### 5", function="math")
    assert (right, wrong) == ("\\boxed{1072}", "\\boxed{5}")
    assert math.math_reward(sample(right, "so #### 1,072")) == 1
    assert math.math_reward(sample(wrong, "so #### 1,072")) == 0


@pytest.mark.parametrize("column", ["code", "solution"])
def test_a_program_that_passes_is_a_column(column):
    row = {column: "def f(): pass"}
    [(right, wrong)] = made('["assert f() is None"]', function="code", row=row)
    assert (right, wrong) == ("```python\ndef f(): pass\n```", WRONG_PROGRAM)


def test_a_program_in_a_block_stays_there_and_a_row_may_have_none():
    fenced = "So:\n```python\nx\n```"
    assert made(None, function="code", row={"solution": fenced}) == [(fenced, WRONG_PROGRAM)]
    for row in ({}, {"code": ["x"]}):
        assert made('["assert f()"]', function="code", row=row) == [(WRONG_PROGRAM,)]


def test_several_functions_get_a_box_if_one_is_math():
    found = pairs_of(("math", "exact_match"), {}, ("4", "7"))
    assert found == (("\\boxed{4}", "\\boxed{7}"),)
