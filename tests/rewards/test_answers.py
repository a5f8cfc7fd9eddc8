"""The final answer of a response, and how a reference answer is spelled."""

import json
import math

import pyarrow as pa
import pytest

from lightrl.rewards.answers import after_thinking, answer_text, last_boxes
from lightrl.rewards.base import Sample
from lightrl.rewards.builtin import exact_match, regex_reward

OPENED = "<|user|>6*7?<|assistant|><think>\n"
CLOSED = "<|user|>6*7?<|assistant|><think>\n\n</think>\n\n"


def sample(response: str, answer: object, prompt: str = "6*7?") -> Sample:
    return Sample(prompt, response, answer, {}, [], "stop")


@pytest.mark.parametrize(
    ("prompt", "response", "rest"),
    [
        ("6*7?", "It is 42.", "It is 42."),
        ("6*7?", "<think>41?</think>It is 42.", "It is 42."),
        ("6*7?", "<think>41?</think>Or<think>43?</think>42", "42"),
        ("6*7?", "<thinking>41?</thinking>42", "42"),
        ("6*7?", "[THINK]41?[/THINK]42", "42"),
        ("6*7?", "[THINK]It is 42.", None),
        ("6*7?", "◁think▷41?◁/think▷42", "42"),
        ("6*7?", "<seed:think>It is 42.", None),
        ("6*7?", "<|begin_of_thought|>41?<|end_of_thought|>42", "42"),
        ("6*7?", "<|begin_of_thought|>It is 42.", None),
        ("6*7?", "<|think|>41?<|/think|>42", "42"),
        ("6*7?", "<Reasoning>41?</Reasoning>42", "42"),
        ("6*7?", "42 [for a reason] if 1 < think", "42 [for a reason] if 1 < think"),
        ("6*7?<assistant>[THINK]\n", "It is 42.", None),
        ("6*7?", "<think>It is 42.", None),
        ("6*7?", "<think>a</think>42<think>41", None),
        (OPENED, "41?</think>42", "42"),
        (OPENED, "It is 42", None),
        (CLOSED, "It is 42", "It is 42"),
        ("What does <think> mean?", "42", "42"),
    ],
)
def test_what_follows_the_last_thought_is_final(prompt, response, rest):
    assert after_thinking(prompt, response) == rest


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no box", []),
        (r"\boxed{41} wait, \boxed{42}", ["42"]),
        (r"\boxed{\frac{1}{2}} or so", [r"\frac{1}{2}"]),
        (r"\boxed{\left\{1, 2\right\}}", [r"\left\{1, 2\right\}"]),
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$.", ["1", "2", "3"]),
        (r"\boxed{1}\text{ or }\boxed{2}", ["1", "2"]),
        (r"\fbox{7}", ["7"]),
        (r"\boxed{41} no: \boxed{4", [""]),
    ],
)
def test_the_last_box_is_read_to_its_brace(text, found):
    assert last_boxes(text) == found


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"<think>\boxed{42}</think>It is 41.", "42", 0.0),
        (r"<think>\boxed{41}</think>It is 42.", "42", 1.0),
        (r"<think>So \boxed{42}", "42", 0.0),
        (r"\boxed{41}, no: \boxed{42}", "42", 1.0),
        (r"\boxed{42}, no: \boxed{41}", "42", 0.0),
        (r"\boxed{42} or rather \boxed{4", "42", 0.0),
        (r"\boxed{18}", r"\$18", 1.0),
        (r"\boxed{17}", r"\$18", 0.0),
        ("It costs $18.", "$18", 1.0),
        (r"They cost \boxed{$10, $20}", "$10, $20", 1.0),
        (r"They cost \boxed{10} and \boxed{\$20}", r"\$10, \$20", 1.0),
        (r"They cost \boxed{$10, $21}", "$10, $20", 0.0),
        (r"\boxed{$x = 5$}", "$5$", 1.0),
        (r"It costs \$1,234.", r"US\$1,234", 1.0),
        (r"\boxed{\text{\$}18}", "€18", 1.0),
        (r"x is \boxed{1} or \boxed{-1}", "-1, 1", 1.0),
        (r"x is \boxed{1} or \boxed{2}", "-1, 1", 0.0),
        (r"\boxed{9}", 9.0, 1.0),
        ("0.0000001", 1e-07, 1.0),
        ("42", math.nan, None),
        ("It is 5.", r"First \boxed{4}, so \boxed{5}.", 1.0),
    ],
)
def test_math_judges_the_final_answer(response, answer, reward):
    pytest.importorskip("math_verify")
    from lightrl.rewards.answers import math_reward

    assert math_reward(sample(response, answer)) == reward


def test_math_knows_a_thought_that_the_prompt_opened():
    pytest.importorskip("math_verify")
    from lightrl.rewards.answers import math_reward

    assert math_reward(sample(r"It is \boxed{42}", "42", OPENED)) == 0.0
    assert math_reward(sample(r"It is \boxed{42}", "42", CLOSED)) == 1.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (9.0, "9"),
        (9, "9"),
        (-0.5, "-0.5"),
        (1e-07, "0.0000001"),
        (" 9.0 ", "9.0"),
        (math.nan, None),
        (None, None),
    ],
)
def test_an_answer_as_it_is_spelled(answer, text):
    assert answer_text(answer) == text


def test_a_table_with_a_gap_makes_floats_of_integers():
    """As pandas and pyarrow do where a value is missing or has a fraction."""
    rows = pa.table({"answer": [9.0, 2.5, None]}).to_pylist()
    regex = regex_reward(r"#### (\S+)")
    for response, row, reward in zip(("9", "2.5", "9"), rows, (1.0, 1.0, None), strict=True):
        assert exact_match(sample(response, row["answer"])) == reward
        assert regex(sample(f"#### {response}", row["answer"])) == reward
    assert exact_match(sample("9.0", 9.0)) == 1.0
    assert exact_match(sample("9.5", 9.0)) == 0.0
    assert exact_match(sample("9.0", "9")) == 0.0
    nan = json.loads("NaN")
    assert exact_match(sample("nan", nan)) is None
    assert regex(sample("#### nan", nan)) is None
