"""Rows as verl, LiveCodeBench, APPS, TACO, MBPP, HumanEval and KodCode have them, column by column:
a right program gets 1, a wrong one 0, and what their own comparisons say is what ours says.

See volcengine/verl, verl/utils/reward_score/{prime_code,sandbox_fusion}; KodCode-AI/code-r1,
coder1; LiveCodeBench, lcb_runner/{benchmarks/code_generation,evaluation/testing_util}.py.
"""

import json
from typing import Any

import pytest

from lightrl.data.layouts import answer_of
from lightrl.rewards.code.cases import AssertCase, CallCase, InputCase, cases_of
from lightrl.rewards.code.compare import same_text, same_value
from lightrl.rewards.code.reward import CodeReward
from tests.rewards.test_code import hidden, sample
from tests.rewards.test_sandbox import (
    LIMITS,
    LONG_S,
    pytestmark,  # noqa: F401 - where no sandbox can be had
)

SUM_OF_LINE = "n = int(input())\nprint(sum(map(int, input().split())))\n"
SUM_WRONG = SUM_OF_LINE.replace("sum(", "max(")
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
"""
TWO_SUM_WRONG = TWO_SUM.replace("[seen[target - n], i]", "[i, seen[target - n]]")
STDIN = {"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5\n"]}
CALLS = {
    "fn_name": "twoSum",
    "inputs": ["[2, 7, 11, 15]\n9", "[3, 2, 4]\n6"],
    "outputs": ["[0, 1]", "[1, 2]"],
}
NATIVE_CALLS = {  # TACO and APPS: no text inside
    "fn_name": "twoSum",
    "inputs": [[[2, 7, 11, 15], 9], [[3, 2, 4], 6]],
    "outputs": [[[0, 1]], [[1, 2]]],
}
LIVE_STDIN = {
    "question_title": "Sum",
    "question_content": "Add the numbers.",
    "platform": "atcoder",
    "question_id": "abc300_a",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps(
        [{"input": "3\n1 2 3\n", "output": "6\n", "testtype": "stdin"}]
    ),
    "private_test_cases": hidden([{"input": "1\n5\n", "output": "5\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
LIVE_CALLS = {
    "platform": "leetcode",
    "starter_code": TWO_SUM.partition("        seen")[0],
    "public_test_cases": json.dumps(
        [{"input": "[2, 7, 11, 15]\n9", "output": "[0, 1]", "testtype": "functional"}]
    ),
    "private_test_cases": hidden(
        [{"input": "[3, 2, 4]\n6", "output": "[1, 2]", "testtype": "functional"}]
    ),
    "metadata": json.dumps({"func_name": "twoSum"}),
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to find the shared elements from the given two lists.",
    "code": "def similar_elements(a, b):\n    return tuple(set(a) & set(b))",
    "test_list": [
        "assert set(similar_elements((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar_elements((1, 2, 3, 4), (5, 4, 3, 7))) == set((3, 4))",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def truncate_number(number: float) -> float:\n    pass\n",
    "canonical_solution": "    return number % 1.0\n",
    "entry_point": "truncate_number",
    "test": "\n\nMETADATA = {\n    'author': 'jt',\n    'dataset': 'test'\n}\n\n\n"
    "def check(candidate):\n    assert candidate(3.5) == 0.5\n"
    "    assert abs(candidate(1.33) - 0.33) < 1e-6\n",
}
TRUNCATE = "def truncate_number(number):\n    return number % 1.0"
KOD_CODE = {
    "version": "v1.0",
    "question_id": "Prefill_1_I",
    "question": "Write a function that reverses a string.",
    "solution": "def reverse(text):\n    return text[::-1]",
    "test": "from solution import reverse\n\ndef test_reverse_word():\n"
    "    assert reverse('abc') == 'cba'\n\n"
    "def test_reverse_empty():\n    assert reverse('') == ''\n",
    "test_info": [{"function_name": "reverse", "parameter_list": "(text)"}],
}
REVERSE = "def reverse(text):\n    return text[::-1]"
REVERSE_WRONG = "def reverse(text):\n    return text"
FUNCTIONAL = "def check(f):\n    assert f('ab') == 'ba'\ncheck(reverse)"


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(timeout_s=LONG_S, limits=LIMITS)


@pytest.mark.parametrize(
    ("answer", "row", "right", "wrong"),
    [
        (json.dumps(STDIN), {"data_source": "codecontests"}, SUM_OF_LINE, SUM_WRONG),
        (json.dumps(STDIN | {"fn_name": None}), {}, SUM_OF_LINE, SUM_WRONG),
        (json.dumps(CALLS), {"data_source": "apps"}, TWO_SUM, TWO_SUM_WRONG),
        (CALLS, {}, "def twoSum(n, t): return (0, 1) if t == 9 else (1, 2)", "def twoSum(n, t): 0"),
        (
            json.dumps({"assert_case": MBPP["test_list"]}),
            {},
            MBPP["code"],
            "similar_elements = min",
        ),
        (
            {"assert_case": [FUNCTIONAL], "inputs": [""], "outputs": [None]},
            {},
            REVERSE,
            REVERSE_WRONG,
        ),
        (json.dumps({"functional": FUNCTIONAL}), {}, REVERSE, REVERSE_WRONG),
        (json.dumps({"pytest": KOD_CODE["test"]}), {}, REVERSE, REVERSE_WRONG),
        (KOD_CODE["test"], {}, REVERSE, REVERSE_WRONG),
        (None, KOD_CODE, REVERSE, REVERSE_WRONG),
        (None, LIVE_STDIN, SUM_OF_LINE, SUM_WRONG),
        (None, LIVE_CALLS, TWO_SUM, TWO_SUM_WRONG),
        (None, {"input_output": json.dumps(STDIN)}, SUM_OF_LINE, SUM_WRONG),
        (None, {"input_output": json.dumps(NATIVE_CALLS)}, TWO_SUM, TWO_SUM_WRONG),
        (None, MBPP, MBPP["code"], "def similar_elements(a, b): return a"),
        (None, HUMAN_EVAL, TRUNCATE, "def truncate_number(number): return number"),
    ],
)
def test_a_row_of_another_project(
    reward: CodeReward, answer: Any, row: dict[str, Any], right: str, wrong: str
) -> None:
    fenced = f"I think it is this.\n```python\n{right}\n```\n"
    assert reward(sample(fenced, answer, **row))["reward"] == 1.0
    assert reward(sample(f"```python\n{wrong}\n```", answer, **row))["reward"] == 0.0


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(1)\nexit()", {"inputs": [""], "outputs": ["1"]}),
        ("print(1)\nquit()", {"inputs": [""], "outputs": ["1"]}),
        ("print(datetime.date(2020, 1, 1).year)", {"inputs": [""], "outputs": ["2020"]}),
        ("print(deepcopy([gcd(4, 6)])[0], maxsize > 1)", {"inputs": [""], "outputs": ["2 True"]}),
        ("print(stdin.readline().upper())", {"inputs": ["a\n"], "outputs": ["A"]}),
        (
            "def f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
            {"inputs": [""], "outputs": ["20000"]},
        ),
        (
            "\ufefffrom __future__ import annotations\r\nx: Missing = 1\r\nprint(gcd(4, 6))",
            {"inputs": [""], "outputs": ["2"]},
        ),
        (
            "if __name__ == '__main__':\n    print(input())",
            {"inputs": ["a"], "outputs": ["a"]},
        ),
        (
            "class Solution: pass\ndef f(a): return a",
            {"fn_name": "f", **{k: ["1"] for k in ("inputs", "outputs")}},
        ),
        (
            "class Solution:\n    def gcd(self, a): return gcd(a, 4)\nprint(gcd(2, 4))",
            {"fn_name": "gcd", "inputs": ["6"], "outputs": ["2"]},
        ),
        # Keys that were whole numbers before they were JSON, as verl undoes it.
        ("def f(d): return d[1]", {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [2]}),
        ("def f(d): return d['a']", {"fn_name": "f", "inputs": [[{"a": 2}]], "outputs": [2]}),
        ("def f(a): return {1: a}", {"fn_name": "f", "inputs": ["2"], "outputs": ['{"1": 2}']}),
        ("def f(a): return a + 'b'", {"fn_name": "f", "inputs": [["a"]], "outputs": ["ab"]}),
    ],
)
def test_what_runs_there_runs_here(reward: CodeReward, program: str, tests: dict[str, Any]) -> None:
    assert reward(sample(program, tests))["reward"] == 1.0


@pytest.mark.parametrize(
    ("row", "cases"),
    [
        (
            {"input_output": json.dumps(NATIVE_CALLS)},
            [
                CallCase("twoSum", [[2, 7, 11, 15], 9], [[0, 1]]),
                CallCase("twoSum", [[3, 2, 4], 6], [[1, 2]]),
            ],
        ),
        (
            {"input_output": json.dumps(STDIN)},
            [InputCase("3\n1 2 3\n", "6\n"), InputCase("1\n5\n", "5\n")],
        ),
        (KOD_CODE, [AssertCase(str(KOD_CODE["test"]))]),
        (KOD_CODE | {"entry_point": "def reverse(text):"}, [AssertCase(str(KOD_CODE["test"]))]),
        ({"test": "assert f()", "entry_point": "f"}, [AssertCase("assert f()")]),
    ],
)
def test_cases_of_columns(row: dict[str, Any], cases: list[Any]) -> None:
    assert cases_of(answer_of(row, "answer"), row) == cases


def test_a_reference_program_beside_tests_is_none_of_them():
    row = KOD_CODE | {"solution": "def reverse(text):\n    assert text\n    return text[::-1]"}
    assert cases_of(answer_of(row, "answer"), row) == [AssertCase(str(KOD_CODE["test"]))]
    assert cases_of(row["test"], {"answer": row["test"]}) == [AssertCase(str(KOD_CODE["test"]))]


# (written, expected, what both references say)
TEXTS = [
    ("6\n", "6", True),
    ("6", "6\n\n", True),
    ("  6", "6", True),
    ("6 \n7 \n", "6\n7", True),
    (" 6\n 7", "6\n7", True),
    ("6\r\n7\r\n", "6\n7", True),
    ("6 7", "6\n7", False),
    ("6\n7", "6 7", False),
    ("67", "6 7", False),
    ("Yes", "YES", False),
    ("yes", "yes ", True),
    ("6", "", False),
    ("", "6", False),
    ("", "", True),
    ("6\n6", "6", False),
    ("1.0", "1", True),
    ("0.50", "0.5", True),
    ("1e3", "1000", True),
    ("-0.0", "0.0", True),
    ("50000000000000000", "50000000000000001", False),
    ("0.1", "0.2", False),
    ("abc", "abd", False),
    ("a\tb", "a\tb", True),
    ("[1, 2]", "[1, 2]", True),
    ("True", "true", False),
    ("nan", "nan", True),
    ("e", "1", False),
]
# Where they differ: what ours says.
OURS = [
    ("0.3333333", "0.33333333", True),  # verl: a relative error of 1e-5; LiveCodeBench: none
    ("07", "7", False),  # LiveCodeBench: equal, "0011" and "11" as well
    ("1  2", "1 2", True),  # verl: as sets of words; LiveCodeBench: as numbers
    ("1\n\n2", "1\n2", True),  # verl: blank lines do not count; LiveCodeBench: they do
    ("3 2 1", "1 2 3", False),  # verl: sets of words
    ("1 2", "2 1", False),
    ("a  b", "a b", True),  # verl: sets of words; LiveCodeBench: numbers only
]


@pytest.mark.parametrize(("written", "expected", "same"), TEXTS + OURS)
def test_output_is_compared_as_there(written: str, expected: str, same: bool) -> None:
    assert same_text(written, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (3, 3.0, True),
        (True, 1, True),
        (0, False, True),
        ("3", 3, False),
        ("a", "A", False),
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        (5, [5], True),
        ([5], [5], True),
        ([5], [[5]], True),
        (None, None, True),
        (None, 0, False),
        ([], [], True),
        ([], None, False),
        (0.1 + 0.2, 0.3, True),
        ("", "", True),
        ([["a"], []], [["a"], []], True),
        ([1, 2], [1, 2, 3], False),
        ([1, 2, 3], [1, 2], False),
        (1, [1, 2], False),  # verl: equal
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
    ],
)
def test_values_are_compared_as_there(returned: Any, expected: Any, same: bool) -> None:
    assert same_value(returned, expected) is same
