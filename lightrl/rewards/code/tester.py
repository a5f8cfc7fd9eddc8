"""The program that runs assertions: the test in this process, the response's code in a child, so
that nothing the code does can change what the test compares, or what it has compared.

`python tester.py`, with the code in main.py and {"code": test, "prelude": text, "theirs": names,
"token": t} in JSON on standard input, writes {"token": t} once the test has run. Data goes between
the two as copies; everything else (functions, generators, objects of the response's classes) stays
where it is and is asked from afar. What comes from the child is not trusted: see `_Data`. A test
whose `theirs` is null needs the response's own process, where it can be deceived.
"""

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import io
import json
import operator
import os
import pickle
import sys
import types
from typing import Any, NoReturn

# Copied. Each compares by what it holds, and none has methods that the response could write.
DATA = (
    *(int, float, complex, bool, str, bytes, bytearray, type(None), range, slice),
    *(list, tuple, dict, set, frozenset),
    *(collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque),
    *(decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
)
CHANGING = (list, dict, set, bytearray, collections.deque)
BASES: tuple[Any, ...] = (int, float, str, bytes, list, tuple, dict, set, frozenset)
NAMED = {(kind.__module__, kind.__qualname__): kind for kind in DATA}
NUMPY = frozenset({"_reconstruct", "scalar", "ndarray", "dtype", "_frombuffer"})
# Classes that a pickle could change are called, and not at hand.
MUTABLE = (collections.Counter, fractions.Fraction)
# What the test may ask of an object, and what the response may ask of one of the test's.
COMPARED, COMPUTED = ("eq", "lt", "le", "gt", "ge"), ("add", "sub", "mul", "neg")
ASKED = {
    "call": lambda f, *args, **named: f(*args, **named),
    **{name: getattr(operator, name) for name in (*COMPARED, *COMPUTED, "getitem")},
    **{f.__name__: f for f in (getattr, setattr, len, iter, next, str, repr, bool, abs, hash)},
}
ASKED_BACK = frozenset({"call", "len", "iter", "next", "getitem"})  # no way to a frame


class Remote:
    """An object of the other process. Never equal to data, nor more or less: what its class says of
    that is the response's word. So is the number that it makes of itself and of data ("f() - 3"),
    which may be what the test expects of it: what comes of that stays an object."""

    _knows = False  # data of the test, by what it was computed from

    def __init__(self, peer: "Peer", key: int) -> None:
        self.__dict__.update(_peer=peer, _key=key)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __hash__(self) -> int:
        return self._peer.ask("hash", self)


def _forward(name: str) -> Any:
    return lambda self, *others: self._peer.ask(name, self, *others)


def _compute(name: str) -> Any:
    def ask(self: Remote, *others: Any) -> Any:
        knows = self._knows or any(type(other) is not Remote or other._knows for other in others)
        answer = self._peer.ask(name, self, *others)
        if knows:
            if type(answer) is not Remote:
                raise TypeError(f"{name}: of an object and data of the test only an object is made")
            answer.__dict__["_knows"] = True
        return answer

    return ask


def _reduce(name: str) -> Any:
    def ask(self: Remote) -> Any:
        if self._knows:
            raise TypeError(f"{name}: of an object that was computed from data of the test")
        return self._peer.ask(name, self)

    return ask


def _compare(name: str) -> Any:
    return lambda self, other: (
        self._peer.ask(name, self, other) if type(other) is Remote else NotImplemented
    )


for _name in ("getitem", "len", "iter", "next", "str", "repr"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in COMPUTED:
    setattr(Remote, f"__{_name}__", _compute(_name))
for _name in ("bool", "abs"):
    setattr(Remote, f"__{_name}__", _reduce(_name))
for _name in COMPARED:
    setattr(Remote, f"__{_name}__", _compare(_name))


class Peer:
    """One end. Whoever waits for an answer answers questions meanwhile."""

    def __init__(self, source: int, sink: int, names: "dict[str, Any] | None") -> None:
        """`names`: of the response, in its own process; None in the test's."""
        self._source, self._sink = os.fdopen(source, "rb"), os.fdopen(sink, "wb")
        self.names = names
        self._ours: dict[int, Any] = {}
        self._theirs: dict[int, Remote] = {}

    def ask(self, what: str, *args: Any, **named: Any) -> Any:
        self._send((what, args, named))
        while True:
            kind, *rest = self._receive()
            if kind == "answer":
                answer, changed = rest
                for one, now in zip(args, changed, strict=False):
                    _update(one, now)
                return answer
            if kind == "raise":
                raise _exception(*rest)
            self._answer(kind, *rest)

    def serve(self) -> NoReturn:
        while True:
            self._answer(*self._receive())

    def _answer(self, what: str, args: Any, named: Any) -> None:
        try:
            if self.names is None:
                if what not in ASKED_BACK:
                    raise PermissionError(what)
                answer = ASKED[what](*args, **named)
            elif what == "name":
                answer = self.names[args[0]]
            elif what == "names":
                answer = [name for name, value in self.names.items() if _is_own(name, value)]
            else:
                answer = ASKED[what](*args, **named)
            # The callee may have changed what it was given.
            changed = [each if isinstance(each, CHANGING) else None for each in args]
            self._send(("answer", answer, changed))
        except BaseException as e:  # noqa: BLE001 - whatever it is, the test may expect it
            kinds = (k.__name__ for k in type(e).__mro__ if k.__module__ == "builtins")
            self._send(("raise", next(kinds), str(e)))

    def _send(self, message: Any) -> None:
        data = io.BytesIO()  # all of it or nothing
        _Pickler(data, self._ours, self.names is None).dump(message)
        self._sink.write(data.getbuffer())
        self._sink.flush()

    def _receive(self) -> Any:
        reader = _Data if self.names is None else _Anything
        return reader(self._source, self._ours, self._remote).load()

    def _remote(self, key: int) -> Remote:
        if key not in self._theirs:
            self._theirs[key] = Remote(self, key)
        return self._theirs[key]


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, ours: dict[int, Any], is_test: bool) -> None:
        super().__init__(file, protocol=5)
        self._ours = ours
        self._is_test = is_test

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Remote:
            return ("yours", obj.__dict__["_key"])
        if kind in DATA or kind.__module__ == "numpy" or isinstance(obj, BASES):
            return None
        if isinstance(obj, type | types.BuiltinFunctionType) and self._is_known(obj):
            return None
        self._ours[id(obj)] = obj
        return ("mine", id(obj))

    def _is_known(self, obj: Any) -> bool:
        """The test's names of libraries mean the same there; the response's are not believed."""
        if (obj.__module__, obj.__qualname__) in NAMED:
            return True
        return self._is_test and not _is_own(obj.__qualname__, obj)

    def reducer_override(self, obj: Any) -> Any:
        """An object of a class that inherits from data is that data."""
        for base in BASES:
            if isinstance(obj, base) and type(obj) not in DATA:
                return base, (base(obj),)
        return NotImplemented


class _Anything(pickle.Unpickler):
    def __init__(self, file: Any, ours: dict[int, Any], remote: Any) -> None:
        super().__init__(file)
        self._ours, self._remote = ours, remote

    def persistent_load(self, pid: Any) -> Any:
        whose, key = pid
        return self._remote(key) if whose == "mine" else self._ours[key]


class _Data(_Anything):
    """Of what the response sends: nothing can be named but what only holds data."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name.partition(".")[0] == "numpy" and global_name in NUMPY:
            return super().find_class(module_name, global_name)
        kind = NAMED[module_name, global_name]
        return kind.__call__ if kind in MUTABLE else kind


def _is_own(name: str, value: Any) -> bool:
    """Whether it is of no library."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return not isinstance(value, types.ModuleType) and getattr(module, name, None) is not value


def _update(given: Any, now: Any) -> None:
    """An argument that the function has changed."""
    if type(given) is Remote or type(given) is not type(now) or given == now:
        return
    if isinstance(given, list | bytearray | collections.deque):
        given.clear()
        given.extend(now)
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)


def _exception(kind: str, text: str) -> Exception:
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(TypeError):  # one that wants more than a text
            return found(text)
    return RuntimeError(f"{kind}: {text}")


class _Solution(types.ModuleType):
    """What a test imports the response's names from."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [n for n in self.peer.ask("names") if n[:1] != "_" and n in self.wanted]
        if name[:2] == "__":
            raise AttributeError(name)
        return self.peer.ask("name", name)


def main() -> None:
    with open("main.py", encoding="utf-8") as file:
        program = file.read()
    to_child, from_test = os.pipe()
    to_test, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(from_test)
        os.close(to_test)
        _serve_response(program, to_child, from_child)
    os.close(to_child)
    os.close(from_child)
    request = json.loads(sys.stdin.buffer.read())  # only now: the child has nothing of it
    names: dict[str, Any] = {"__name__": "test"}
    if request["theirs"] is None:
        os.close(from_test)
        answers = _hide_streams()
        _run_program(program, names)
        solution = types.ModuleType("solution")
        solution.__dict__.update(names)
    else:
        answers = 1
        peer = Peer(to_test, from_test, None)
        solution = _Solution("solution")
        # of all names ("import *") those that the test means: no builtins, no modules
        solution.__dict__.update(peer=peer, wanted=frozenset(request["theirs"]))
        exec(request["prelude"], names)
        defined = set(peer.ask("names"))
        theirs = defined.intersection(request["theirs"])
        names.update({name: peer.ask("name", name) for name in theirs})
    sys.modules["solution"] = solution
    run_test(request["code"], names)
    os.write(answers, json.dumps({"token": request["token"]}).encode())
    os._exit(0)


def run_test(code: str, names: dict[str, Any], compile: Any = compile, exec: Any = exec) -> None:
    """The text, then its functions and classes that pytest would run."""
    exec(compile(code, "test", "exec"), names)
    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test_"):
            if value.__code__.co_filename == "test":
                value()
        elif isinstance(value, type) and name.startswith("Test"):
            is_case = hasattr(value, "assertEqual")  # unittest's
            for each in [n for n in dir(value) if n.startswith("test_")]:
                one = value(each) if is_case else value()
                for step in ("setUp" if is_case else "setup_method", each, "tearDown"):
                    getattr(one, step, lambda: None)()


def _hide_streams() -> int:
    """What the code reads and prints is not the test's. Returns a descriptor for the answer."""
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return answers


def _run_program(program: str, names: dict[str, Any]) -> None:
    names.update({"__name__": "main", "__file__": "main.py"})
    exec(compile(program, "main.py", "exec"), names)


def _serve_response(program: str, source: int, sink: int) -> NoReturn:
    os.close(_hide_streams())
    names: dict[str, Any] = {}
    try:
        _run_program(program, names)
        Peer(source, sink, names).serve()
    except EOFError:  # the test has no more questions
        pass
    finally:  # it must not go on as its parent
        os._exit(1)


if __name__ == "__main__":
    sys.setrecursionlimit(100_000)
    main()
