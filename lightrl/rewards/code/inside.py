"""The Python program that every sandbox runs: a response with its input, a call, or assertions.

`python -c SOURCE DESCRIPTOR`: the descriptor holds the request, JSON with a `mode`:

- input: the program of the response reads standard input and writes standard output
- call: its function is called with `packed` arguments; `{"value": result}` goes to standard output,
  the result `packed` if the request is `exact`
- test: its assertions run, and `token` goes to standard output if nothing is raised. The program
  runs in the same process, where it could deceive them
"""

import builtins
import contextlib
import json
import os
import sys
import types
from collections.abc import Callable, Mapping, Set
from numbers import Number
from typing import Any

# LiveCodeBench and verl put these before every program, and answers rely on it. (Their `statistics`
# takes longer than all others.) Python was started without `exit` and `quit`.
MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
PRELUDE = (
    "".join(f"from {m} import *\n" for m in (*MODULES, "builtins", "typing"))
    + f"import {', '.join(MODULES)}\nquit = exit\n"
)

# What has parts, and what `unpacked` makes of them.
PARTS = {list: list, tuple: tuple, bytes: bytes, set: set, Set: frozenset, Mapping: dict}
MAKERS = {maker.__name__: maker for maker in PARTS.values()}


def run_input(request: dict[str, Any]) -> None:
    run_program(request["program"], "__main__")


def run_call(request: dict[str, Any]) -> None:
    _, output = hide_streams()
    name, is_exact = request["function"], request["exact"]
    arguments = unpacked(request["arguments"])
    names = run_program(request["program"], "main", name)
    is_method = not is_exact and hasattr(names.get("Solution"), name)
    function = getattr(names["Solution"](), name) if is_method else names[name]
    value = packed(function(*arguments)) if is_exact else function(*with_whole_keys(arguments))
    os.write(output, json.dumps({"value": value}, default=_plain).encode())
    os._exit(0)


def packed(value: Any) -> Any:
    """Return data, and what inherits from them, as JSON of which `unpacked` makes data that are
    equal in Python. Raise TypeError for anything else. Equal data have as many commas."""
    if value is None or isinstance(value, str | int | float):
        return value
    is_number = issubclass(type(value), Number) or hasattr(value, "dtype")
    for number in (int, float) if is_number else ():
        if number(value.real) == value:
            return number(value.real)
    for kind, maker in PARTS.items():
        if isinstance(value, kind):
            parts = value.items() if maker is dict else value
            return [maker.__name__, [packed(part) for part in parts]]
    raise TypeError(f"no plain data: {type(value).__name__}")


def unpacked(value: Any) -> Any:
    return MAKERS[value[0]](map(unpacked, value[1])) if isinstance(value, list) else value


def _plain(value: Any) -> list[Any]:
    return value.tolist() if hasattr(value, "tolist") else list(value)  # also numbers of numpy


def with_whole_keys(arguments: list[Any]) -> list[Any]:
    """Return the arguments with the keys of a first one that was {1: ...}, which JSON turns into
    texts, as verl and APPS do."""
    with contextlib.suppress(IndexError, AttributeError, ValueError):
        return [{int(k): v for k, v in arguments[0].items()}, *arguments[1:]]
    return arguments


def run_test(request: dict[str, Any]) -> None:
    """The text of a test, which can import the program as `solution`, then its functions and
    classes that pytest would run."""
    _, output = hide_streams()
    names = run_program(request["program"], "main")
    sys.modules["solution"] = types.ModuleType("solution")
    sys.modules["solution"].__dict__.update(names)
    before = dict(names)
    exec(compile(request["test"], "test", "exec"), names)
    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test_"):
            if value.__code__.co_filename == "test":
                _call(value)
        elif name.startswith("Test") and isinstance(value, type) and value is not before.get(name):
            is_case = hasattr(value, "assertEqual")  # unittest's
            for each in [n for n in dir(value) if n.startswith("test_")]:
                one = value(each) if is_case else value()
                for step in ("setUp" if is_case else "setup_method", each, "tearDown"):
                    _call(getattr(one, step, lambda: None))
    os.write(output, request["token"].encode())
    os._exit(0)


def _call(function: Callable[[], Any]) -> None:
    result = function()
    if isinstance(result, types.CoroutineType):
        import asyncio

        asyncio.run(result)


def hide_streams() -> tuple[int, int]:
    """Give the program empty streams; return descriptors of the real ones."""
    hidden = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return hidden


def run_program(text: str, name: str, function: str = "") -> dict[str, Any]:
    """Return its names, and that of the function only if the program itself has made it."""
    with open("main.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    module = sys.modules[name] = types.ModuleType(name)
    names = module.__dict__
    names["__file__"] = "main.py"
    exec(PRELUDE, names)
    if function in names:  # `add` is one of operator
        setattr(builtins, function, names.pop(function))
    exec(compile(text.removeprefix("\ufeff"), "main.py", "exec"), names)
    return names


def main() -> None:
    with os.fdopen(int(sys.argv[1])) as file:
        request = json.load(file)
    sys.argv = ["main.py"]
    sys.setrecursionlimit(100_000)
    sys.set_int_max_str_digits(0)
    {"input": run_input, "call": run_call, "test": run_test}[request["mode"]](request)


if __name__ == "__main__":
    main()
