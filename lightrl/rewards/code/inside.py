"""The Python program that every sandbox runs: a response with its input, a call, or assertions.

`python -c SOURCE DESCRIPTOR`: the descriptor holds the request, JSON with a `mode`:

- input: the program of the response reads standard input and writes standard output
- call: its function is called; `{"value": result}` goes to standard output
- test: its assertions run, and `token` goes to standard output if nothing is raised. The program
  runs in the same process, where it could deceive them
"""

import json
import os
import sys
import types
from collections.abc import Callable
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


def run_input(request: dict[str, Any]) -> None:
    run_program(request["program"], "__main__")


def run_call(request: dict[str, Any]) -> None:
    _, output = hide_streams()
    names = run_program(request["program"], "main")
    name = request["function"]
    if "Solution" in names and hasattr(names["Solution"], name):
        function = getattr(names["Solution"](), name)
    elif name in compiled(request["program"]).co_names:
        function = names[name]
    else:
        raise NameError(name)  # the prelude has it: `add` is one of operator
    answer = {"value": function(*with_whole_keys(request["arguments"]))}
    os.write(output, json.dumps(answer, default=_plain).encode())


def _plain(value: Any) -> list[Any]:
    return value.tolist() if hasattr(value, "tolist") else list(value)  # also numbers of numpy


def with_whole_keys(arguments: list[Any]) -> list[Any]:
    """Return the arguments with the keys of a first one that was {1: ...}, which JSON turns into
    texts, as verl and APPS do."""
    if arguments and isinstance(arguments[0], dict):
        try:
            return [{int(k): v for k, v in arguments[0].items()}, *arguments[1:]]
        except ValueError:
            pass
    return arguments


def run_test(request: dict[str, Any]) -> None:
    """The text of a test, which can import the program as `solution`, then its functions and
    classes that pytest would run."""
    _, output = hide_streams()
    names = run_program(request["program"], "main")
    sys.modules["solution"] = types.ModuleType("solution")
    sys.modules["solution"].__dict__.update(names)
    exec(compile(request["test"], "test", "exec"), names)
    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test_"):
            if value.__code__.co_filename == "test":
                _call(value)
        elif isinstance(value, type) and name.startswith("Test"):
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


def run_program(text: str, name: str) -> dict[str, Any]:
    with open("main.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    module = sys.modules[name] = types.ModuleType(name)
    names = module.__dict__
    names["__file__"] = "main.py"
    exec(PRELUDE, names)
    exec(compiled(text), names)
    return names


def compiled(text: str) -> types.CodeType:
    return compile(text.removeprefix("\ufeff"), "main.py", "exec")


def main() -> None:
    with os.fdopen(int(sys.argv[1])) as file:
        request = json.load(file)
    sys.argv = ["main.py"]
    sys.setrecursionlimit(100_000)
    sys.set_int_max_str_digits(0)
    {"input": run_input, "call": run_call, "test": run_test}[request["mode"]](request)


if __name__ == "__main__":
    main()
