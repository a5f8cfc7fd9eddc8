"""Which responses are tried as right and wrong ones, held against the built-in functions."""

import pytest

from lightrl.config.reward import Reward
from lightrl.rewards.base import Sample
from lightrl.rewards.builtin import exact_match, regex_reward
from lightrl.rewards.forms import Pair, altered, pairs, program_of_row, text_of

CUSTOM = "rewards.py:reward"


def made(answer, *others, function=CUSTOM, regex="", row=()) -> list[tuple[str | None, str]]:
    found = pairs((function,), Reward(regex=regex), dict(row), answer, others)
    return [(pair.right, pair.wrong) for pair in found]


def sample(response: str, answer: str) -> Sample:
    return Sample("?", response, answer, {}, [], "stop")


def test_an_answer_is_tried_as_it_stands_and_wrapped():
    found = made(72, 72, 10)
    assert found[:4] == [
        ("72", "10"),
        ("\\boxed{72}", "\\boxed{10}"),
        ("#### 72", "#### 10"),
        ("<answer>72</answer>", "<answer>10</answer>"),
    ]
    assert ("<think>\nSo it is.\n</think>\n<answer>\n72\n</answer>") in [
        right for right, _ in found
    ]
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("She sold 48+24 = 72.\n#### 72", "72"),
        ("Thus $x = \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        (["4", "four"], "4"),
        ({"target": 98, "numbers": [44, 54]}, "98"),
    ],
)
def test_of_an_answer_with_its_derivation_the_end_is_wrapped(answer, end):
    found = made(answer, "#### 7")
    assert found[0][0] == text_of(answer)
    assert (f"\\boxed{{{end}}}", "\\boxed{7}") in found


def test_the_answer_of_another_row_is_no_wrong_one_if_it_ends_alike():
    assert made("so #### 4", "thus #### 4", "#### 5", function="exact_match") == [
        ("so #### 4", "#### 5")
    ]


@pytest.mark.parametrize(
    ("answer", "other"), [("19", "10"), ("(A)", "(B)"), ("yes", "yet"), ("3.", "4."), ("+", "+ 1")]
)
def test_without_another_answer_it_is_changed(answer, other):
    assert altered(answer) == other
    assert made(answer, answer, None, function="exact_match") == [(answer, other)]


@pytest.mark.parametrize("answer", [None, "", [], {"tests": ["x"]}])
def test_without_an_answer_only_a_wrong_response_is_known(answer):
    assert made(answer, "4") == [(None, "I do not know.")]


def test_exact_match_pays_the_answer_and_a_judge_reads_it():
    [(right, wrong)] = made("36,03", "40", function="exact_match")
    assert exact_match(sample(right or "", "36,03")) == 1
    assert exact_match(sample(wrong, "36,03")) == 0
    assert made("36", "40", function="judge") == [("36", "40")]


@pytest.mark.parametrize(
    "pattern",
    [
        "#### (.+)",
        r"####\s*(-?[0-9.,]+)",
        r"\\boxed\{(.*?)\}",
        r"<answer>\s*(\d+)\s*</answer>",
        r"(?i)^the answer is:?\s+(\d+)\.$",
        r"Final: \((\d+)\)",
        r"(\d+)",
        r"Result = (?:\$)?(\d+)",
    ],
)
def test_a_pattern_finds_the_answer_in_a_form_that_fits_it(pattern):
    right, wrong = made("72", "10", function="regex", regex=pattern)[0]
    reward = regex_reward(pattern)
    assert reward(sample(right or "", "72")) == 1
    assert reward(sample(wrong, "72")) == 0


def test_a_pattern_that_nothing_fits_gets_the_answer_as_it_stands():
    assert made("72", "10", function="regex", regex=r"([a-z]+)\d{9}") == [("72", "10")]


def test_math_pays_a_box():
    math = pytest.importorskip("lightrl.rewards.math")
    [(right, wrong)] = made("so #### 1,072", "#### 5", function="math")
    assert (right, wrong) == ("\\boxed{1072}", "\\boxed{5}")
    assert math.math_reward(sample(right, "so #### 1,072")) == 1
    assert math.math_reward(sample(wrong, "so #### 1,072")) == 0


@pytest.mark.parametrize(
    ("row", "program"),
    [
        ({"code": "def f(): pass"}, "def f(): pass"),
        (
            {"prompt": "def f():\n", "canonical_solution": "    pass\n", "entry_point": "f"},
            "def f():\n    pass\n",
        ),
        ({"solutions": '["print(1)", "print(2)"]'}, "print(1)"),
        ({"extra_info": {"solution": "print(1)"}}, "print(1)"),
    ],
)
def test_a_program_that_passes_is_a_column(row, program):
    assert program_of_row(row) == f"```python\n{program}\n```"
    [(right, wrong)] = made('["assert f() is None"]', function="code", row=row.items())
    assert (right, wrong) == (program_of_row(row), "```python\nraise SystemExit(1)\n```")


def test_a_program_in_a_block_stays_there_and_a_row_may_have_none():
    assert program_of_row({"solution": "So:\n```python\nx\n```"}) == "So:\n```python\nx\n```"
    [(right, _)] = made('["assert f()"]', function="code")
    assert right is None


def test_several_functions_bring_their_forms():
    found = pairs(("math", "exact_match"), Reward(), {}, "4", ["7"])
    assert found == (Pair("\\boxed{4}", "\\boxed{7}"), Pair("4", "7"))
