"""A link between the processes of an assertion and of the program: calls with plain data.

The source runs in both sandboxes. Data is copied; functions, iterators and objects of classes stay
in their process, and the other one has a `Remote`. A message is a line of JSON. Messages of the
program are not trusted: they can only become data, exceptions or a `Remote`.
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
from collections.abc import Callable
from typing import Any, NoReturn

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

COMPARED, COMPUTED = ("eq", "lt", "le", "gt", "ge"), ("add", "sub", "mul", "neg")
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
# What a program may ask of the assertion's objects: nothing that leads to a frame.
FOR_PROGRAMS = {name: OPERATIONS[name] for name in ("call", "len", "iter", "next", "getitem")}


class Remote:
    """An object of the other process. It is never equal to data, nor more or less: a class of the
    program would decide that. `f() - 3` is an object too, and its `abs` an error: a class could
    return the expected number."""

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
