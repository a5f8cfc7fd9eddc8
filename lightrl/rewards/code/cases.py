"""The tests of a row: the layouts of common data sets as one list of cases.

Must not run anything; a stored pickle is decoded without a call of anything that it names.
"""

import ast
import base64
import binascii
import contextlib
import io
import json
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from lightrl.errors import RewardError
from lightrl.rewards.code.inside import packed

LAYOUTS = (
    'a list of assertions, {"inputs": [...], "outputs": [...], "fn_name": ...} or a list of '
    '{"input": ..., "output": ..., "testtype": ...}'
)
COLUMNS = ("test_list", "test", "input_output", "public_test_cases", "private_test_cases")
MAX_BYTES = 256 << 20  # of decoded tests
# Whether a test of that type is a call; any other type is one if the row names a function.
IS_CALL = {"functional": True, "stdin": False}


@dataclass(frozen=True, slots=True)
class InputCase:
    """A program that reads standard input and writes standard output."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """A call of a function, or of a method of the class Solution.

    Example: CallCase("add", [1, 2], 3)
    """

    function: str
    arguments: list[Any]
    expected: Any
    is_exact: bool = False  # an assertion: of a function only, and compared as Python does


@dataclass(frozen=True, slots=True)
class AssertCase:
    """Python that raises if the program is wrong."""

    code: str


Case: TypeAlias = InputCase | CallCase | AssertCase


def as_call(case: AssertCase) -> CallCase | AssertCase:
    """Return `assert f(1, 2) == 3` as a call, whose result is compared outside the sandbox; any
    other case as it is."""
    with contextlib.suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        [statement] = ast.parse(case.code).body
        match statement:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=function), args=args, keywords=[]),
                    ops=[ast.Eq()],
                    comparators=[right],
                )
            ):
                arguments = [ast.literal_eval(arg) for arg in args]
                expected = ast.literal_eval(right)
                packed([arguments, expected])  # raises for complex numbers
                return CallCase(function, arguments, expected, is_exact=True)
    return case


def cases_of(answer: Any, row: dict[str, Any]) -> list[Case]:
    """The tests in the answer, else in the columns of MBPP, HumanEval, KodCode, APPS (and TACO) or
    LiveCodeBench. Empty if there are none.

    Raises RewardError for an answer in another layout.
    """
    has_tests = any(row.get(column) for column in COLUMNS)
    is_program = has_tests and answer == row.get("solution")  # KodCode's reference
    if answer is not None and answer != "" and not is_program:
        return list(_of_answer(answer, _function_name(row)))
    if row.get("test_list"):
        setup = [row.get("test_setup_code") or "", *(row.get("test_imports") or ())]
        return [AssertCase("\n".join((*setup, test))) for test in row["test_list"]]
    if row.get("test"):
        entry = str(row.get("entry_point") or "")
        call = f"\ncheck({entry})" if entry.isidentifier() and "def check(" in row["test"] else ""
        return [AssertCase(f"{row['test']}{call}")]
    if row.get("input_output"):
        return list(_of_answer(row["input_output"], None))
    found: list[Case] = []
    for column in COLUMNS[-2:]:
        if row.get(column):
            found += _of_answer(_decoded(row[column]), _function_name(row))
    return found


def _of_answer(answer: Any, function: str | None) -> Iterator[Case]:
    if isinstance(answer, str):
        try:
            parsed = json.loads(answer)
        except ValueError:
            if "assert" not in answer:
                _unknown(answer)
            yield AssertCase(answer)  # a file of tests
            return
        yield from _of_answer(parsed, function)
    elif isinstance(answer, dict):
        # Beside assertions verl has pairs of an empty input and None, one for each.
        codes = [*(answer.get("assert_case") or ())]
        codes += [answer[key] for key in ("functional", "pytest") if answer.get(key)]
        yield from map(AssertCase, codes)
        inputs, outputs = answer.get("inputs") or [], answer.get("outputs") or []
        if len(inputs) != len(outputs) or not (inputs or codes):
            _unknown(answer)
        function = answer.get("fn_name") or function
        for given, expected in zip(inputs, outputs, strict=True):
            if not codes or expected is not None:
                yield _pair(given, expected, function)
    elif isinstance(answer, list) and answer:
        for item in answer:
            if isinstance(item, str):
                yield AssertCase(item)
            elif isinstance(item, dict) and {"input", "output"} <= item.keys():
                is_call = IS_CALL.get(item.get("testtype") or "")
                metadata = item.get("metadata")
                own = metadata.get("func_name") if isinstance(metadata, dict) else None
                yield _pair(item["input"], item["output"], own or function, is_call)
            else:
                _unknown(item)
    else:
        _unknown(answer)


def _pair(given: Any, expected: Any, function: str | None, is_call: bool | None = None) -> Case:
    if is_call is None:
        is_call = function is not None
    if is_call and function is None:
        raise RewardError('code: a test calls a function, but the row names none ("fn_name")')
    if not is_call or function is None:
        return InputCase(_lines(given), _lines(expected))
    is_text = isinstance(given, str)
    try:
        if isinstance(given, str):
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
        if isinstance(expected, str):
            expected = json.loads(expected)
    except ValueError:
        if is_text:
            _unknown({"input": given, "output": expected})
    return CallCase(function, given if isinstance(given, list) else [given], expected)


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _function_name(row: dict[str, Any]) -> str | None:
    """LiveCodeBench has it in a column of JSON."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _decoded(column: Any) -> Any:
    """LiveCodeBench's hidden tests are JSON in a pickle in zlib in base64."""
    if not isinstance(column, str) or column.lstrip()[:1] in ("[", "{"):
        return column
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(column, validate=True), MAX_BYTES)
        if unpacker.unconsumed_tail:
            raise RewardError(f"code: the tests of a row are longer than {MAX_BYTES >> 20} MiB")
        return _Plain(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError):
        _unknown(column)


class _Plain(pickle.Unpickler):
    """Unpickle only strings, numbers, lists and dicts."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name}")


def _unknown(answer: Any) -> NoReturn:
    raise RewardError(f"code: no tests in {str(answer)[:60]!r}: expected {LAYOUTS}")
