"""Assertions about a program, and programs that try to deceive them."""

import json
from typing import Any

import numpy as np
import pytest

from lightrl.rewards.code.cases import AssertCase, CallCase, as_call
from lightrl.rewards.code.inside import packed, unpacked
from lightrl.rewards.code.reward import has_returned, run_case
from lightrl.rewards.code.sandbox import Ended, Sandbox
from tests.rewards.test_sandbox import (
    LIMITS,
    LONG_S,
    pytestmark,  # noqa: F401 - where no sandbox can be had
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


def passes(sandbox: Sandbox, program: str, test: str) -> bool:
    return run_case(sandbox, program, AssertCase(test), LONG_S)[1]


CHEATS = {
    "equal to everything": """
class Equal:
    __eq__ = __lt__ = __gt__ = __contains__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __sub__ = __rsub__ = lambda self, other: self
    __abs__ = lambda self: self
    __float__ = lambda self: 3.0
    __hash__ = lambda self: hash(3)
def add(a, b): return Equal()
""",
    "a number equal to everything": """
class Equal(int):
    __eq__ = __lt__ = lambda self, other: True
    __sub__ = __abs__ = lambda self, *other: self
    __hash__ = lambda self: hash(3)
def add(a, b): return Equal(9)
""",
    "a class equal to everything": """
class Meta(type):
    __eq__ = lambda self, other: True
    __hash__ = lambda self: hash(3)
class Equal(metaclass=Meta): pass
def add(a, b): return Equal
""",
    "computes what is expected": """
class Number:
    __add__ = __sub__ = __mul__ = lambda self, other: 0.0
def add(a, b): return Number()
""",
    "computes what is small": """
class Number:
    __add__ = __sub__ = __mul__ = __neg__ = lambda self, *other: Number()
    __abs__ = lambda self: 0.0
    __bool__ = lambda self: False
def add(a, b): return Number()
""",
    "other modules and functions": """
class math:
    isclose = staticmethod(lambda *a, **k: True)
def isclose(*a, **k): return True
all = any = abs = eq = reduce = isclose
fabs = floor = dumps = Counter = deque = lambda *a: 0
def add(a, b): return 9
""",
    "ends well": "import os\ndef add(a, b): os._exit(0)",
    "ends well at once": "import sys\nsys.exit(0)",
    "raises an exit": "def add(a, b): raise SystemExit(0)",
    "raises an interrupt": "def add(a, b): raise KeyboardInterrupt",
    "ends its parent": "import os\ndef add(a, b): os.kill(os.getppid(), 9)",
    "other builtins": """
import builtins, json
builtins.exec = builtins.abs = builtins.len = lambda *a, **k: 0
builtins.compile = lambda *a, **k: (lambda: 0).__code__
json.dumps = lambda o, **k: '{}'
def add(a, b): return 9
""",
    "a trace": """
import sys, threading
sys.settrace(lambda *a: None)
threading.Thread(target=lambda: [print('{"token": 1}') for _ in iter(int, 1)], daemon=True).start()
def add(a, b): return 9
""",
    "the token from frames, garbage and input": """
import gc, json, os, sys
def tell(token):
    for d in range(64):
        try: os.write(d, json.dumps({"token": token}).encode())
        except OSError: pass
    os._exit(0)
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, dict) and "token" in value:
                tell(value["token"])
        frame = frame.f_back
    for value in gc.get_objects():
        if type(value) is dict and "token" in value:
            tell(value["token"])
    for d in range(64):
        try: data = os.pread(d, 1 << 20, 0)
        except OSError: continue
        if b'"token"' in data:
            tell(json.loads(data)["token"])
    return 9
""",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_an_assertion_about_plain_data_is_not_deceived(sandbox: Sandbox, cheat: str) -> None:
    assert not passes(sandbox, CHEATS[cheat], "assert add(1, 2) == 3")


@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if "end" in cheat or "raise" in cheat])
def test_the_end_of_the_process_passes_no_test(sandbox: Sandbox, cheat: str) -> None:
    assert not passes(sandbox, CHEATS[cheat], "assert not add(1, 2) != 3")


RIGHT = {
    "data of all kinds": (
        "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\n"
        "def f(): return {1: (Decimal('1.5'), Fraction(1, 2), {2}, 1 + 2j, range(3), b'x', None)}",
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "assert f() == {1: (Decimal('1.5'), Fraction(1, 2), {2}, 1 + 2j, range(3), b'x', None)}",
    ),
    "classes that inherit from data": (
        "from collections import Counter, namedtuple, OrderedDict\nP = namedtuple('P', 'x y')\n"
        "class L(list): pass\n"
        "def f(): return [P(1, 2), Counter('aab'), OrderedDict(a=1), L([1])]",
        "assert f() == [(1, 2), {'a': 2, 'b': 1}, {'a': 1}, [1]]",
    ),
    "a generator that never ends": (
        "def f(n):\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(f(3), 2)) == [3, 4]",
    ),
    "an argument that is changed": (
        "def f(rows, seen):\n    for row in rows: row.reverse()\n    seen.add(1)",
        "rows, seen = [[1, 2], [3, 4]], set()\nf(rows, seen)\n"
        "assert rows == [[2, 1], [4, 3]] and seen == {1}",
    ),
    "objects of its classes": (
        "class P:\n    def __init__(self, a): self.a = a\n"
        "    def __eq__(self, other): return self.a == other.a\n"
        "    def __len__(self): return 5\n    def __getitem__(self, k): return k\n"
        "    def __add__(self, other): return P(self.a + other.a)\n"
        "    def __lt__(self, other): return self.a < other.a\n"
        "def f(p): return p.a",
        "p = P(3)\nassert f(p) == 3 and p.a == 3 and len(p) == 5 and p[7] == 7\n"
        "p.a = 4\nassert f(p) == 4 and P(1) + P(3) == p and P(1) != p and P(1) < p",
    ),
    "computing with its objects": (
        "class V:\n    def __init__(self, a): self.a = a\n"
        "    def __mul__(self, k): return V(self.a * k)\n    def __neg__(self): return V(-self.a)\n"
        "    def __sub__(self, other): return self.a - other.a\n"
        "    def __abs__(self): return self.a\n",
        "assert (V(3) * 2).a == 6 and (-V(3)).a == -3 and V(3) - V(1) == 2 and abs(V(4)) == 4",
    ),
    "a name of the prelude that is to be written": (
        "def isclose(a, b): return 7",
        "assert isclose(1, 2) == 7",
    ),
    "a name like that of a module": ("def copy(a): return a[:]", "assert copy([1]) == [1]"),
    "future imports": (
        "from __future__ import annotations  # so\r\nfrom __future__ import (\n  division,\n)\r\n"
        "def f(a: Unknown): return 1 / 2\r\n",
        "assert f(1) == 0.5",
    ),
    "a method": (
        "class Solution:\n    def f(self, a): return a + 1",
        "assert Solution().f(1) == 2",
    ),
    "functions of the test": (
        "def f(g, xs): return sorted([g(x) for x in xs], key=str)",
        "assert f(lambda x: x * 2, [1, 2]) == [2, 4] and f(abs, [-1]) == [1]\n"
        "assert f(str, [1]) == ['1']",
    ),
    "an exception": (
        "class Bad(ValueError): pass\ndef f(): raise Bad('so')",
        "try:\n    f()\nexcept ValueError as e:\n    said = str(e)\nassert said == 'so'",
    ),
    "its class of exceptions": (
        "class Bad(Exception): pass\ndef f(): raise Bad",
        "try:\n    f()\nexcept Bad:\n    done = True\nassert done",
    ),
    "a context manager of it": (
        "class M:\n    def __enter__(self): return 3\n    def __exit__(self, *e): return True\n"
        "def f(): return M()",
        "with f() as g:\n    assert g == 3\nwith f():\n    raise ValueError",
    ),
    "asynchronous functions": (
        "async def f(): return 3",
        "from solution import f\n\nasync def test_f():\n    assert await f() == 3",
    ),
    "isinstance": ("class A: pass\ndef f(): return A()", "assert isinstance(f(), A)"),
    "its output": (
        "def f(): print('a')",
        "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nf()\n"
        "text, sys.stdout = sys.stdout.getvalue(), old\nassert text == 'a\\n'",
    ),
    "a name of the prelude": (
        "def gcd(a, b): return 7\ndef f(x: List[int]): return deque(x)",
        "assert gcd(1, 2) == 7 and f([1]) == deque([1])",
    ),
    "what it prints": ("print('a')\ndef f():\n    print('b')\n    return 1", "assert f() == 1"),
    "deep recursion": ("def f(n): return n and 1 + f(n - 1)", "assert f(20_000) == 20_000"),
    "names of a module": (
        "A = 3\n_b = 1\ndef f(a, *, b): return a + b",
        "from solution import *\nimport solution\nassert solution.f(A, b=1) == f(1, b=3) == 4",
    ),
    "a class of tests": (
        "def f(a): return a",
        "from solution import f\n\nclass TestF:\n    def setup_method(self): self.a = 3\n\n"
        "    def test_f(self): assert f(self.a) == 3",
    ),
    "a function that is named like a test": (
        "def test_f(a): return a",
        "import sys\nassert test_f(3) == 3",
    ),
    "a suite": (
        "def f(a): return a",
        "import unittest\nfrom solution import f\n\nclass TestF(unittest.TestCase):\n"
        "    def setUp(self): self.a = 3\n\n    def test_f(self): self.assertEqual(f(self.a), 3)",
    ),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_program_passes(sandbox: Sandbox, what: str) -> None:
    program, test = RIGHT[what]
    outcome, is_right = run_case(sandbox, program, AssertCase(test), LONG_S)
    assert is_right, outcome.errors


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(a): return a", "from solution import f\n\ndef test_f():\n    assert f(1) == 2"),
        (
            "def f(a): return a",
            "import unittest\nfrom solution import f\n\nclass TestF(unittest.TestCase):\n"
            "    def test_f(self): self.assertEqual(f(1), 2)",
        ),
        (
            "def f(a): return a",
            "from solution import f\n\nclass TestF:\n    def test_f(self): assert f(1) == 2",
        ),
        (
            "async def f(): return 3",
            "from solution import f\n\nasync def test_f():\n    assert await f() == 4",
        ),
        ("", "from solution import f\n\ndef test_f():\n    assert f(1) == 2"),
        ("def f(xs): pass", "xs = [2, 1]\nf(xs)\nassert xs == [1, 2]"),
        # A name that is a test only because the response says so is none of the test's.
        ("def test_f(): return 1\ndef f(): return 2", "import sys\nassert f() == 1"),
        ("def f(): return 1\nraise ValueError", "assert f() == 1"),
        ("def f() return 1", "assert f() == 1"),
        ("", "assert add(1, 2) == 3"),  # operator has it
        ("def plus(a, b): return add(a, b)", "assert add(1, 2) == 3"),
        ("def f(): add = 1", "assert add(1, 2) == 3"),
        ("class Solution:\n    def f(self): return 3", "assert f() == 3"),
        (
            "class TestF:\n    def test_f(self): pass\ndef f(a): return a",
            "from solution import f\n\nclass TestF:\n    def test_f(self): assert f(1) == 2",
        ),
    ],
)
def test_a_wrong_program_does_not(sandbox: Sandbox, program: str, test: str) -> None:
    assert not passes(sandbox, program, test)


@pytest.mark.parametrize(
    ("test", "call"),
    [
        ("\nassert f(1, [2]) == (3, 4)", CallCase("f", [1, [2]], (3, 4), True)),
        ("assert f({1: (2,)}) == {2}", CallCase("f", [{1: (2,)}], {2}, True)),
        ("assert f(...) == 3", None),
        ("assert f(1) == ...", None),
        ("assert f(1) == 1 + 2j", None),
        ("assert f(x) == 3", None),
        ("assert f(1) != 3", None),
        ("x = 1\nassert f(1) == 3", None),
        ("assert (", None),
    ],
)
def test_an_assertion_that_is_a_call(test: str, call: CallCase | None) -> None:
    assert as_call(AssertCase(test)) == (call or AssertCase(test))


@pytest.mark.parametrize(
    ("body", "expected", "is_right"),
    [
        ("map(abs, [1])", "[1]", False),
        ("zip([1], [2])", "[(1, 2)]", False),
        ("{1}", "[1]", False),
        ("{1: 2}.keys()", "[1]", False),
        ("{1: 2}.keys()", "{1}", True),
        ("[1]", "(1,)", False),
        ("(1,)", "(1,)", True),
        ("[(1, {2}), b'x', None]", "[(1, {2}), b'x', None]", True),
        ("{'1': 2}", "{1: 2}", False),
        ("{1: 2}", "{1.0: 2}", True),
        ("Counter('aab')", "{'a': 2, 'b': 1}", True),
        ("frozenset([1])", "{1}", True),
        ("set()", "[]", False),
        ("1000001.0", "1000000", False),
        ("0.1 + 0.2", "0.3", False),
        ("True", "1", True),
        ("float('nan')", "3", False),
        ("float('inf')", "1e999", True),
        ("1 + 2j", "1 + 2j", True),
        ("1 + 2j", "1", False),
        ("1 + 0j", "1", True),
        ("__import__('decimal').Decimal('1.5')", "1.5", True),
        ("__import__('decimal').Decimal('0.1')", "0.1", False),
        ("__import__('decimal').Decimal(10**30)", "1" + 30 * "0", True),
        ("[__import__('fractions').Fraction(1, 2)]", "[0.5]", True),
        ("__import__('fractions').Fraction(1, 3)", "0.3333333333333333", False),
        ("f", "3", False),
    ],
)
def test_a_result_equals_a_literal_as_in_python(
    sandbox: Sandbox, body: str, expected: str, is_right: bool
) -> None:
    assert passes(sandbox, f"def f(): return {body}", f"assert f() == {expected}") is is_right


@pytest.mark.parametrize("number", [np.int64(2**60 + 1), np.float32(0.5), np.bool_(True)])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    assert unpacked(packed([number])) == [number.item()]


@pytest.mark.parametrize(
    "returned",
    [
        ["frozenset", [i * (2**61 - 1) for i in range(200_000)]],  # of one hash: slow as a set
        *([], ["exec", ["1"]], ["set", [["list", []]]], ["list", 3], {"list": [3]}, [[], []]),
        *(
            ["dict", [1, 2]],
            ["bytes", [-1]],
            ["bytes", "ab"],
            {"a": 1},
            "3",
            [1],
            ["set"],
            10**4000,
        ),
    ],
)
def test_no_answer_of_a_program_does_harm(returned: Any) -> None:
    ended = Ended("exited", 0, json.dumps({"value": returned}).encode(), "", 0.1)
    assert not has_returned(ended, {3}, is_exact=True)
    assert not has_returned(ended, [[[3]]], is_exact=True)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(a): return a[1, 2] == {2} and a[1]", "assert f({1: 3, (1, 2): {2}}) == 3"),
        ("def f(d): return d['1']", "assert f({'1': 3}) == 3"),
        ("class Solution:\n    def f(self): return 4\ndef f(): return 3", "assert f() == 3"),
        ("import atexit, os\natexit.register(os._exit, 3)\ndef f(): return 3", "assert f() == 3"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[99]).start()\n"
            "def f(): return 3",
            "assert f() == 3",
        ),
        ("def g():\n    global f\n    f = lambda: 3\ng()", "assert f() == 3"),
        ("globals()['f'] = lambda: 3", "assert f() == 3"),
        ("exec('def f(): return 3')", "assert f() == 3"),
        ("from math import *", "assert gcd(6, 9) == 3"),
        ("gcd = math.gcd", "assert gcd(6, 9) == 3"),
        ("from math import gcd", "assert gcd(6, 9) == 3"),
        ("add = add", "assert add(1, 2) == 3"),
        (
            "class TestF:\n    def test_f(self): assert 0\ndef f(): return 3",
            "import os\nassert f()",
        ),
    ],
)
def test_a_program_has_its_function_and_is_all_that_counts(
    sandbox: Sandbox, program: str, test: str
) -> None:
    outcome, is_right = run_case(sandbox, program, AssertCase(test), LONG_S)
    assert is_right, outcome.errors
