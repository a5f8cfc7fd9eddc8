"""The names that an assertion takes from the program, and whether it needs the program's process.

A function of the assertion alone: the response has no influence. Must not run anything.
"""

import ast
import builtins
import symtable
from collections.abc import Iterator

from lightrl.rewards.code.inside import MODULES

# A test that imports one of these looks at its process, or changes it.
TOGETHER = frozenset(
    [
        *("asyncio", "builtins", "contextlib", "gc", "importlib", "inspect", "io", "mock", "os"),
        *("multiprocessing", "subprocess", "sys", "threading", "types", "weakref"),
    ]
)
# Names of the prelude with which a test compares: never the program's, unless it is to write them.
JUDGING = frozenset(
    [
        *("isclose", "isnan", "isinf", "isfinite"),  # of math
        *("floor", "ceil", "trunc", "fabs", "fsum", "dist"),
        *("Counter", "OrderedDict", "defaultdict", "deque", "reduce", "dumps", "deepcopy"),
        *("eq", "ne", "lt", "le", "gt", "ge", "is_", "is_not", "not_", "truth"),  # of operator
    ]
)


def names_apart(code: str) -> list[str] | None:
    """Names that a test takes from the program; None if it must run in the program's process.

    Example: names_apart("assert add(1, 2) == 3") is ["add"].
    """
    try:
        nodes = list(ast.walk(ast.parse(code)))
        tables = list(_tables(symtable.symtable(code, "test", "exec")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if any(map(_needs_program, nodes)):
        return None
    names = [name for table in tables for name in table.get_symbols() if name.is_global()]
    free = {name.get_name() for name in names if name.is_referenced()} - set(dir(builtins))
    free -= {n.get_name() for n in names if n.is_assigned() or n.is_imported() or n.is_namespace()}
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    free -= set(MODULES) - {called.id for called in calls if isinstance(called, ast.Name)}
    return sorted(free - JUDGING or free)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _needs_program(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module)):
            modules = [module]
        case ast.AsyncFunctionDef():
            return True
        case ast.ClassDef(name=name):  # objects of other classes would be the program's to use
            return not name.startswith("Test")
        case _:
            return False
    return any(not TOGETHER.isdisjoint(module.split(".")) for module in modules)
