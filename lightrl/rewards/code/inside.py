"""The Python program that every sandbox runs: a response with its input, a call, or assertions.

`python -c SOURCE DESCRIPTOR`: the descriptor holds the request, JSON with a `mode`:

- input: the program of the response reads standard input and writes standard output
- call: its function is called; `{"value": result}` goes to standard output
- test: an assertion runs, and `token` goes to standard output if nothing is raised. The names that
  it takes from the response are objects of another sandbox, where a request of mode
- serve: answers for them. Standard input of both is one end of a socket
- together: program and assertion share a process, where the program can deceive the assertion

The protocol of test and serve is a line of JSON a message. Data is copied; functions, iterators and
objects of classes stay in their process, and the other one has a `Remote`. Messages of the response
are not trusted: they can only become data, exceptions or a `Remote`.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import functools
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

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

ITEMS = (list, tuple, set, frozenset, collections.deque)
PAIRS = (collections.OrderedDict, collections.Counter, dict)
TEXTS = (bytes, bytearray)
NUMBERS = (int, float, bool, str)  # JSON has these
# Made again from the arguments that `__reduce__` returns.
BY_ARGUMENTS = (
    *(range, slice, decimal.Decimal, fractions.Fraction, datetime.datetime, datetime.date),
    *(datetime.time, datetime.timedelta, datetime.timezone),
)
COPIED = (*ITEMS, *PAIRS, *TEXTS, complex, *BY_ARGUMENTS)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*COPIED, *NUMBERS)}
CHANGING = (list, dict, set, bytearray, collections.deque)

COMPARED, COMPUTED, REDUCED = ("eq", "lt", "le", "gt", "ge"), ("add", "sub", "mul", "neg"), ("abs",)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *args, **named: f(*args, **named),
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager, *raised: manager.__exit__(*raised),
    "instancecheck": lambda kind, value: isinstance(value, kind),
    **{n: getattr(operator, n) for n in (*COMPARED, *COMPUTED, "getitem", "setitem", "delitem")},
    **{f.__name__: f for f in (getattr, setattr, len, iter, next, str, repr, bool, abs, hash)},
}
FORWARDED = (
    *("call", "enter", "exit", "instancecheck", "getitem", "setitem", "delitem", "getattr"),
    *("setattr", "len", "iter", "next", "str", "repr", "hash"),
)
FOR_RESPONSES = frozenset({"call", "len", "iter", "next", "getitem"})  # none leads to a frame


class Remote:
    """An object of the other process. Never equal to data, nor more or less: what its class says of
    that is the response's word. What is computed from it and data (`f() - 3`) stays an object, and
    is no number: it could be whatever the test expects."""

    __slots__ = ("_is_mixed", "_key")

    def __init__(self, key: int) -> None:
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_is_mixed", False)


class Link:
    """The other process. While one side waits for an answer, it answers questions."""

    def __init__(self, descriptor: int, operations: dict[str, Callable[..., Any]]) -> None:
        self._source = os.fdopen(descriptor, "r")
        self._sink = os.fdopen(os.dup(descriptor), "w")
        self._operations = operations  # that the other side may ask for
        self._kept: dict[int, Any] = {}  # objects that it has
        self._remote = functools.cache(Remote)
        for name in FORWARDED:
            setattr(Remote, f"__{name}__", functools.partialmethod(_forward, self, name))
        for name in COMPARED:
            setattr(Remote, f"__{name}__", functools.partialmethod(_compare, self, name))
        for name in (*COMPUTED, "abs", "bool"):
            setattr(Remote, f"__{name}__", functools.partialmethod(_compute, self, name))

    def ask(self, operation: str, *args: Any, **named: Any) -> Any:
        packed = {key: self.pack(value) for key, value in named.items()}
        self._send("ask", operation, [self.pack(value) for value in args], packed)
        while True:
            kind, *rest = self._receive()
            if kind == "ask":
                self._answer(*rest)
            elif kind == "raise":
                raise _exception(*rest)
            else:
                answer, changed = rest
                for index, now in changed:
                    _update(args[index], self.unpack(now))
                return self.unpack(answer)

    def serve(self) -> NoReturn:
        while True:
            self._answer(*self._receive()[1:])

    def _answer(self, operation: str, packed: list[Any], named: dict[str, Any]) -> None:
        try:
            args = [self.unpack(each) for each in packed]
            if operation not in self._operations:
                raise PermissionError(operation)
            call = self._operations[operation]
            result = call(*args, **{key: self.unpack(value) for key, value in named.items()})
            now = [self.pack(arg) if isinstance(arg, CHANGING) else None for arg in args]
            changed = [(i, new) for i, new in enumerate(now) if new and new != packed[i]]
            self._send("return", self.pack(result), changed)
        except BaseException as e:  # noqa: BLE001 - whatever it is, the test may expect it
            self._send("raise", _names_of(type(e)), str(e))

    def _send(self, *message: Any) -> None:
        self._sink.write(json.dumps(message) + "\n")
        self._sink.flush()

    def _receive(self) -> Any:
        line = self._source.readline()
        if not line:  # no test passes because the process of the response has ended
            os._exit(1)
        return json.loads(line)

    def pack(self, value: Any) -> Any:
        """As JSON. An object of a class that inherits from data is that data."""
        if value is None or isinstance(value, NUMBERS):
            return value
        for kind in COPIED:
            if isinstance(value, kind):
                return {kind.__name__: self._parts(kind, value)}
        if type(value).__module__ == "numpy":
            return {"numpy": [value.tolist(), str(value.dtype)]}
        if isinstance(value, Remote):
            return {"yours": value._key}
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return {"exception": _names_of(value)}
            if KINDS.get(value.__name__) is value:
                return {"type": value.__name__}
        self._kept[id(value)] = value
        return {"mine": id(value)}

    def _parts(self, kind: Any, value: Any) -> Any:
        if kind in PAIRS:
            return [[self.pack(key), self.pack(each)] for key, each in value.items()]
        if kind in TEXTS:
            return value.decode("latin-1")
        if kind is complex:
            return [value.real, value.imag]
        return [self.pack(each) for each in (value if kind in ITEMS else value.__reduce__()[1])]

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        ((name, parts),) = packed.items()
        if name == "mine":
            return self._remote(parts)
        if name == "yours":
            return self._kept[parts]
        if name == "exception":
            return _exception_class(tuple(parts))
        if name == "type":
            return KINDS[parts]
        if name == "numpy":
            import numpy

            return numpy.array(parts[0], numpy.dtype(parts[1]))[()]
        kind = KINDS[name]
        if kind in PAIRS:
            return kind({self.unpack(key): self.unpack(value) for key, value in parts})
        if kind in TEXTS:
            return kind(parts.encode("latin-1"))
        values = [self.unpack(each) for each in parts]
        return kind(values) if kind in ITEMS else kind(*values)


def _forward(remote: Remote, link: Link, name: str, *others: Any, **named: Any) -> Any:
    return link.ask(name, remote, *others, **named)


def _compare(remote: Remote, link: Link, name: str, other: Any) -> Any:
    return link.ask(name, remote, other) if isinstance(other, Remote) else NotImplemented


def _compute(remote: Remote, link: Link, name: str, *others: Any) -> Any:
    is_mixed = any(not isinstance(each, Remote) or each._is_mixed for each in (remote, *others))
    answer = link.ask(name, remote, *others)
    if is_mixed:
        if not isinstance(answer, Remote) or name in ("abs", "bool"):
            raise TypeError(f"{name}: an object and data of the test do not make a number")
        object.__setattr__(answer, "_is_mixed", True)
    return answer


def _update(given: Any, now: Any) -> None:
    """An argument that the function has changed."""
    if isinstance(given, list | bytearray):
        given[:] = now
    else:
        given.clear()
        given.extend(now) if isinstance(given, collections.deque) else given.update(now)


def _names_of(kind: type) -> list[str]:
    """Of a class of exceptions, from which the other process makes one like it."""
    return [each.__name__ for each in kind.__mro__ if issubclass(each, BaseException)]


@functools.cache
def _exception_class(names: tuple[str, ...]) -> type[Exception]:
    found = getattr(builtins, names[0], None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return found if issubclass(found, Exception) else RuntimeError  # none ends the test
    return type(names[0], (_exception_class(names[1:]),), {})


def _exception(names: list[str], text: str) -> Exception:
    try:
        return _exception_class(tuple(names))(text)
    except TypeError:  # it needs more than a text
        return RuntimeError(text)


# --- modes ----------------------------------------------------------------------------------------


def run_input(request: dict[str, Any]) -> None:
    run_program(request["program"], "__main__")


def run_call(request: dict[str, Any]) -> None:
    _, output = hide_streams()
    names = run_program(request["program"], "main")
    name = request["function"]
    if "Solution" in names and hasattr(names["Solution"], name):
        function = getattr(names["Solution"](), name)
    else:
        function = names[name]
    answer = {"value": function(*with_whole_keys(request["arguments"]))}
    os.write(output, json.dumps(answer, default=list).encode())


def with_whole_keys(arguments: list[Any]) -> list[Any]:
    """JSON has made texts of the keys of a first argument that was {1: ...}: as verl and APPS undo
    it."""
    if arguments and isinstance(arguments[0], dict):
        try:
            return [{int(k): v for k, v in arguments[0].items()}, *arguments[1:]]
        except ValueError:
            pass
    return arguments


def serve(request: dict[str, Any]) -> None:
    socket, _ = hide_streams()
    names = run_program(request["program"], "main")
    prelude: dict[str, Any] = {}
    exec(PRELUDE, prelude)

    def defined(wanted: list[str]) -> dict[str, Any]:
        """Those that the program has defined: neither the prelude's nor modules."""
        found = {name: names[name] for name in wanted if name in names}
        return {
            name: value
            for name, value in found.items()
            if value is not prelude.get(name) and not isinstance(value, types.ModuleType)
        }

    Link(socket, {**OPERATIONS, "name": names.__getitem__, "defined": defined}).serve()


def run_apart(request: dict[str, Any]) -> None:
    socket, output = hide_streams()
    link = Link(socket, {name: OPERATIONS[name] for name in FOR_RESPONSES})
    names: dict[str, Any] = {"__name__": "test"}
    exec(PRELUDE, names)
    found = link.ask("defined", request["names"])
    names.update(found)

    def look_up(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return link.ask("name", name)

    public = [name for name in found if name[0] != "_"]
    run_test(request, names, {**found, "__getattr__": look_up, "__all__": public}, output)


def run_together(request: dict[str, Any]) -> None:
    _, output = hide_streams()
    names = run_program(request["program"], "main")
    run_test(request, names, names, output)


def run_test(
    request: dict[str, Any], names: dict[str, Any], solution: dict[str, Any], output: int
) -> None:
    """The text, then its functions and classes that pytest would run; `names` and what the test can
    import from the module `solution`."""
    sys.modules["solution"] = types.ModuleType("solution")
    sys.modules["solution"].__dict__.update(solution)
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
    """Gives the program empty streams. Returns descriptors of the real ones."""
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
    exec(compile(text.removeprefix("\ufeff"), "main.py", "exec"), names)
    return names


def main() -> None:
    with os.fdopen(int(sys.argv[1])) as file:
        request = json.load(file)
    sys.argv = ["main.py"]
    sys.setrecursionlimit(100_000)
    sys.set_int_max_str_digits(0)
    run = {"input": run_input, "call": run_call, "serve": serve, "test": run_apart}
    run.get(request["mode"], run_together)(request)


if __name__ == "__main__":
    main()
