"""What a test says about itself: which of its names are the program's, and whether the two can run
in processes of their own. Must not run anything, nor look at the program: a response has no say in
it.
"""

import ast
import builtins
from collections import Counter
from collections.abc import Collection, Iterator

SOLUTION = "solution"  # the module that tests for pytest import the program from
# They look at the process that they are in, or change it.
TOGETHER = frozenset(
    [
        *("asyncio", "builtins", "contextlib", "gc", "importlib", "inspect", "io", "mock", "os"),
        *("multiprocessing", "subprocess", "sys", "threading", "types", "weakref"),
    ]
)
# What they make of a value, or say of two, a test compares or believes.
JUDGING = frozenset(
    [
        *("isclose", "isnan", "isinf", "isfinite"),  # of math
        *("floor", "ceil", "trunc", "fabs", "fsum", "dist"),
        *("Counter", "OrderedDict", "defaultdict", "deque", "reduce", "dumps", "deepcopy"),
        *("eq", "ne", "lt", "le", "gt", "ge", "is_", "is_not", "not_", "truth"),  # of operator
    ]
)
# Of these a class must be at hand.
WITH_CLASSES = frozenset({"isinstance", "issubclass", "raises", "assertRaises", "assertIsInstance"})


def names_apart(code: str, modules: Collection[str] = ()) -> list[str] | None:
    """Names that a test takes from the program; None if it must run in the program's process.
    `modules`: that a test finds without an import.

    Example: names_apart("assert add(1, 2) == 3") is ["add"].
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    theirs = _free(nodes)
    theirs -= _of_modules(nodes, modules)
    if theirs - JUDGING:  # else it is one of these that was to be written
        theirs -= JUDGING
    theirs |= set(_imported(nodes))
    return None if any(_needs_program(node, theirs) for node in nodes) else sorted(theirs)


def _free(nodes: list[ast.AST]) -> set[str]:
    loaded, bound = set[str](), set[str](dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return loaded - bound


def _of_modules(nodes: list[ast.AST], modules: Collection[str]) -> set[str]:
    """Those of which something is asked for wherever they stand, as in `math.isclose`."""
    loaded = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    asked = Counter(
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    return {name for name in modules if asked[name] == loaded[name]}


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
            yield from (alias.name for alias in node.names if alias.name != "*")


def _needs_program(node: ast.AST, theirs: set[str]) -> bool:
    match node:
        case ast.Import():
            return any(_is_together(alias.name) for alias in node.names)
        case ast.ImportFrom():
            return _is_together(node.module or "")
        case ast.ClassDef():  # objects of other classes would be the program's to use
            return not node.name.startswith("Test") or _mentions(node.bases, theirs)
        case ast.ExceptHandler():
            return node.type is not None and _mentions([node.type], theirs)
        case ast.With():
            return any(_mentions([item.context_expr], theirs) for item in node.items)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in WITH_CLASSES:
            return _mentions([a for a in node.args if isinstance(a, ast.Name | ast.Tuple)], theirs)
        case ast.AsyncFunctionDef() | ast.AsyncWith() | ast.Await() | ast.Global():
            return True
        case _:
            return False


def _is_together(module: str) -> bool:
    return not TOGETHER.isdisjoint(module.split("."))


def _mentions(nodes: list[ast.expr], theirs: set[str]) -> bool:
    inner = (each for node in nodes for each in ast.walk(node))
    return any(isinstance(each, ast.Name) and each.id in theirs for each in inner)
