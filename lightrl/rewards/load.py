"""Import of the user's function "path.py:name".

Owns how its file is imported: as a script, or as a member of its package where it imports by dots.
Runs user code, so in the reward worker only.
"""

import importlib
import importlib.util
import inspect
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from lightrl.errors import RewardError
from lightrl.rewards import kept

logger = logging.getLogger(__name__)


def import_function(reference: str) -> Callable[..., Any]:
    """The function "path.py:name"; of a class, an object. Raises RewardError, one line."""
    file, name = split_reference(reference)
    path = Path(file)
    if not path.is_file() and str(path.absolute()) not in kept.KEPT:
        raise RewardError(f"{reference}: no such file")
    module = _import_file(path.absolute())
    function = getattr(module, name, None)
    if inspect.isclass(function) and any("__call__" in vars(base) for base in function.__mro__):
        try:
            return cast("Any", function)()
        except TypeError as e:
            raise RewardError(f"{reference}: is a class that needs arguments: {e}") from None
    if not callable(function) or inspect.isclass(function):
        found = [
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        raise RewardError(
            f"{reference}: no such function; {path.name} defines {', '.join(found) or 'none'}"
        )
    return function


def split_reference(reference: str) -> tuple[str, str]:
    """("path.py", "function"). Raises RewardError for any other form."""
    file, colon, name = reference.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise RewardError(f'{reference!r}: expected a built-in name or "path.py:function"')
    return file, name


def distinct_names(names: Sequence[str], references: Sequence[str]) -> list[str]:
    """Return names of figures: a repeated one becomes FILE.NAME, with a number if that repeats."""
    repeated = {name for name, count in Counter(names).items() if count > 1}
    found: list[str] = []
    for name, reference in zip(names, references, strict=True):
        if name in repeated:
            file, _, called = reference.rpartition(":")
            name = f"{Path(file).stem}.{called}" if file.endswith(".py") else called
        numbered = (f"{name}-{k}" for k in itertools.count(2))
        found.append(name if name not in found else next(n for n in numbered if n not in names))
        names = [*names, found[-1]]
    return found


@cache  # functions of one file share its state
def _import_file(path: Path) -> ModuleType:
    sys.path.append(os.getcwd())  # of the project that it belongs to
    depth = kept.package_depth(path)
    if depth:
        return _import_member(path, path.parents[depth])
    name, folder = path.stem, str(path.parent)
    known = sys.modules.get(name)
    if known is not None and _is_file(getattr(known, "__file__", None), path):
        return known
    is_taken = known is not None or _is_found(name, path)
    if is_taken:
        name = f"{path.parent.name}_{name}"
    if is_taken or (path.parent / "__init__.py").is_file():
        # its name may be that of an installed package: verl's package has math_verify.py
        sys.path.append(folder)
    else:
        sys.path.insert(0, folder)  # it can import its neighbours, as a script can
    spec = kept.spec_of(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle in user code look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half of a module
        raise
    return module


def _import_member(path: Path, root: Path) -> ModuleType:
    """Import a file as a member of its package below `root`."""
    sys.path.insert(0, str(root))
    parts = [*path.relative_to(root).with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    if len(parts) > 1:
        _import_package(parts[0], root / parts[0])
    top = importlib.import_module(parts[0])
    if str(root / parts[0]) not in [*getattr(top, "__path__", ())]:
        raise RewardError(
            f"{path}: imports from its package {parts[0]!r}, but that name is taken by {top}"
        )
    for depth in range(2, len(parts)):
        _import_package(".".join(parts[:depth]), root.joinpath(*parts[:depth]))
    return importlib.import_module(".".join(parts))


def _import_package(name: str, folder: Path) -> ModuleType:
    """Import a package. Omit an __init__.py that cannot be imported: its member may not need it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        logger.warning("%s: %s is imported without its __init__.py: %s", folder, name, e)
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        return package


def _is_found(name: str, path: Path) -> bool:
    """Return whether `name` can be imported, and is another file."""
    spec = importlib.util.find_spec(name)
    return spec is not None and not _is_file(spec.origin, path)


def _is_file(file: str | None, path: Path) -> bool:
    return file is not None and Path(file).exists() and path.samefile(file)
