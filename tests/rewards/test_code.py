"""The reward "code" without a sandbox: which tests a row brings, and what counts as right."""

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from lightrl.errors import RewardError
from lightrl.rewards.base import Sample
from lightrl.rewards.code.cases import AssertCase, CallCase, InputCase, cases_of
from lightrl.rewards.code.compare import same_text, same_value
from lightrl.rewards.code.reward import (
    LONGEST_S,
    SHORTEST_S,
    program_of,
    time_limit,
)


def sample(response: str, answer: Any = None, **row: Any) -> Sample:
    return Sample("prompt", response, answer, row, [1], "stop")


def _test(given: str, expected: str, kind: str = "stdin") -> dict[str, Any]:
    return {"input": given, "output": expected, "testtype": kind}


def hidden(tests: Any) -> str:
    """As LiveCodeBench packs them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


@pytest.mark.parametrize("pack", [json.dumps, lambda answer: answer])
@pytest.mark.parametrize(
    ("answer", "cases"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, [InputCase("1\n", "2\n")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [InputCase("1\n2", "3")]),
        (
            {"inputs": ["[1]\n \n2\n"], "outputs": ["3"], "fn_name": "f"},
            [CallCase("f", [[1], 2], 3)],
        ),
        (
            {"inputs": ["[1]\n2"], "outputs": ["3"], "fn_name": "f"},
            [CallCase("f", [[1], 2], 3)],
        ),
        ({"inputs": [[[1], 2]], "outputs": [[3]], "fn_name": "f"}, [CallCase("f", [[1], 2], [3])]),
        (
            ["assert f(1) == 2", "assert f(2) == 3"],
            [AssertCase("assert f(1) == 2"), AssertCase("assert f(2) == 3")],
        ),
        ({"inputs": [5], "outputs": [6], "fn_name": "f"}, [CallCase("f", [5], 6)]),
        ({"assert_case": ["assert f(1) == 2"]}, [AssertCase("assert f(1) == 2")]),
        ([_test("1", "2")], [InputCase("1", "2")]),
        (
            [
                {
                    "input": "1",
                    "output": "2",
                    "testtype": "functional",
                    "metadata": {"func_name": "f"},
                }
            ],
            [CallCase("f", [1], 2)],
        ),
    ],
)
def test_tests_of_an_answer(answer: Any, cases: list[Any], pack: Any) -> None:
    assert cases_of(pack(answer), {}) == cases


@pytest.mark.parametrize(
    ("row", "cases"),
    [
        (
            {"test_list": ["assert f(1)"], "test_setup_code": "x = 1"},
            [AssertCase("x = 1\nassert f(1)")],
        ),
        (
            {"test_list": ["assert f(1)"], "test_imports": ["import math"]},
            [AssertCase("\nimport math\nassert f(1)")],
        ),
        (
            {"test": "def check(c): assert c()", "entry_point": "f"},
            [AssertCase("def check(c): assert c()\ncheck(f)")],
        ),
        (
            {
                "public_test_cases": json.dumps(
                    [{"input": "1", "output": "2", "testtype": "stdin"}]
                ),
                "private_test_cases": hidden([_test("3", "4")]),
            },
            [InputCase("1", "2"), InputCase("3", "4")],
        ),
        (
            {
                "public_test_cases": json.dumps(
                    [{"input": "1\n2", "output": "3", "testtype": "functional"}]
                ),
                "metadata": json.dumps({"func_name": "add"}),
            },
            [CallCase("add", [1, 2], 3)],
        ),
        (
            {
                "public_test_cases": [_test("1", "2"), {"input": "3", "output": "4"}],
                "metadata": {"func_name": "f"},
            },
            [InputCase("1", "2"), CallCase("f", [3], 4)],
        ),
        ({"public_test_cases": [_test("1", "2")], "metadata": "a text"}, [InputCase("1", "2")]),
        ({}, []),
    ],
)
def test_tests_of_columns(row: dict[str, Any], cases: list[Any]) -> None:
    assert cases_of(None, row) == cases


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        42,
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"},
        [],
        {},
        0,
        [1],
    ],
)
def test_an_answer_without_tests_is_one_line(answer: Any) -> None:
    with pytest.raises(RewardError, match="expected a list of assertions") as raised:
        cases_of(answer, {})
    assert "\n" not in str(raised.value)


def test_a_stored_pickle_calls_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("called",))

    column = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(RewardError):
        cases_of(None, {"private_test_cases": column})
    assert "called" not in capsys.readouterr().out


def test_stored_tests_that_grow_beyond_measure_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.rewards.code.cases.MAX_BYTES", 1000)
    row = {"private_test_cases": hidden([_test("1", "2" * 2000)])}
    with pytest.raises(RewardError, match="the tests of a row are longer than"):
        cases_of(None, row)


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("1\n\n2\n", "1\r\n2\r\n", True),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1e3", "1000.0", True),
        ("07", "7", False),
        ("yes", "YES", False),
        ("", "1", False),
        ("1e-12", "0.0", True),
        ("1000.1", "1000.0", False),
        ("1.5 x", "1.5", False),
        ("1.5", "1.5 x", False),
        ("0.1\n0.2", "0.1", False),
        ("x.y", "1.5", False),
    ],
)
def test_text_is_compared_as_judges_do(written: str, expected: str, same: bool) -> None:
    assert same_text(written, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ([1, 2], [1, 2], True),
        (3, [3], True),
        (0.1 + 0.2, 0.3, True),
        (True, 1, True),
        (1, True, True),
        (False, 1, False),
        (True, "True", False),
        ([[1], [2]], [[1], [3]], False),
        ({"a": 1}, {"a": 1}, True),
        (None, None, True),
        (10**20, 10**20 + 1, False),
        (10**400, 0.5, False),
    ],
)
def test_values_are_compared_as_json(returned: Any, expected: Any, same: bool) -> None:
    assert same_value(returned, expected) is same


def test_a_column_may_name_the_function_of_an_answer() -> None:
    row = {"metadata": json.dumps({"func_name": "f"})}
    assert cases_of({"inputs": ["1"], "outputs": ["2"]}, row) == [CallCase("f", [1], 2)]


def test_a_test_that_calls_a_function_needs_its_name() -> None:
    with pytest.raises(RewardError, match="the row names none"):
        cases_of([_test("1", "2", "functional")], {})


def test_the_last_block_is_the_program() -> None:
    assert program_of("First\n```python\na\n```\nthen\n```py\nb\n```\n") == "b\n"
    assert program_of("```python\nx = 1") == "x = 1"  # cut off by the length limit
    assert program_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
    "response",
    [
        "```python\na\n```\nIt prints:\n```\n4\n```\n",
        "```text\n2 3\n```\nThe program:\n```python\na\n```\n",
        "```bash\npip install x\n```\n\n```Python\na\n```\nand\n```output\n4\n```",
        "```\na\n```\n```json\n{}\n```",
        "Use ``x``.\n```py\na\n```",
    ],
)
def test_a_block_of_something_else_is_no_program(response: str) -> None:
    assert program_of(response) == "a\n"


@pytest.mark.parametrize(
    ("anchor_s", "limit_s"), [(None, LONGEST_S), (0.1, SHORTEST_S), (4.0, 6.0), (25.0, LONGEST_S)]
)
def test_time_limits_follow_the_slowest_right_answer(
    anchor_s: float | None, limit_s: float
) -> None:
    assert time_limit(anchor_s) == limit_s
