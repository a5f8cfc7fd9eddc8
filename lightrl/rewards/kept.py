"""A copy of the source of the user's reward functions from the start of a run, which all workers
import, even after edits of the files.

The coordinator reads the files and keeps the copy in the run directory; workers receive it.
`__file__` stays the path of the original, so that functions find data beside it.
"""

import ast
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from lightrl.errors import RewardError
from lightrl.system import files

FOLDER = "rewards"  # in a run directory; the whole path of each file is below it


def sources(functions: Iterable[str], folder: Path, is_new: bool) -> tuple[dict[str, bytes], str]:
    """Absolute path -> content of the modules of "path.py:function"s, from the copy in `folder` if
    there is one; and a line about files that have changed since, or "".

    `is_new`: the copy is replaced by the files. Raises RewardError if it cannot be written or
    read.
    """
    now = dict(_read(functions))
    try:
        kept = {f"/{file.relative_to(folder)}": file.read_bytes() for file in folder.rglob("*.py")}
        changed = sorted(path for path, source in kept.items() if now.get(path) != source)
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        line = f"{changed[0]}{more} changed since the run began: " if changed else ""
        if kept and not is_new:
            used = f'the copy in {folder} scores; reward.source = "files" takes the new files'
            return kept, line and line + used
        draft = folder.with_name(f".{folder.name}.draft")
        for old in (draft, folder):
            shutil.rmtree(old, ignore_errors=True)
        for path, source in now.items():
            files.make_folder(draft.joinpath(path.removeprefix("/")).parent)
            files.write_whole(draft / path.removeprefix("/"), source)
        if now:
            draft.rename(folder)
    except OSError as e:
        raise RewardError(f"{folder}: no copy of the reward functions: {e.strerror}") from None
    return now, line and f"{line}the new files score from here on"


def _read(functions: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Each file and its imports, also indirect ones, from its own folder, its package, the working
    directory or PYTHONPATH. The import reports a file that cannot be read."""
    searched = "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for function in functions:
        first = Path(function.rpartition(":")[0]).absolute()
        depth, seen = package_depth(first), set[Path]()
        todo = [first, *(package / "__init__.py" for package in first.parents[:depth])]
        roots = [first.parent, first.parents[depth], *(Path(f).absolute() for f in searched)]
        while todo:
            file = todo.pop()
            if file in seen or not (file.is_file() and os.access(file, os.R_OK)):
                continue
            seen.add(file)
            yield str(file), (source := file.read_bytes())
            for base, parts in _imports(source, file, roots):
                for part in parts:
                    base /= part
                    todo += (base / "__init__.py", base.with_name(f"{part}.py"))


def _imports(
    source: bytes, file: Path, roots: Sequence[Path]
) -> Iterator[tuple[Path, Sequence[str]]]:
    """Folders, and dotted names of modules that may lie in them."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            names = [[*module, alias.name] for alias in node.names]
            bases = [file.parents[node.level - 1]] if node.level else roots
        elif isinstance(node, ast.Import):
            names, bases = [alias.name.split(".") for alias in node.names], roots
        else:
            continue
        yield from ((base, n) for n in names if n[0] != "lightrl" for base in bases)


def package_depth(path: Path) -> int:
    """The number of folders of the package of a file that imports by dots; else 0."""
    try:
        tree = ast.parse(KEPT.get(str(path)) or path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 0  # the import raises it
    dots = max((n.level for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)), default=0)
    folders = 0
    while (path.parents[folders] / "__init__.py").is_file():
        folders += 1
    return max(dots, folders) if dots else 0


def install(kept: Mapping[str, bytes]) -> None:
    """Make this process import the modules of these files from these sources."""
    KEPT.update(kept)
    sys.meta_path.insert(0, _Finder())


def spec_of(name: str, path: Path) -> ModuleSpec | None:
    """Return the spec with which a file is imported by its path."""
    loader = _Loader(name, str(path)) if str(path) in KEPT else None
    return spec_from_file_location(name, path, loader=loader)


class _Loader(SourceFileLoader):
    """Load a module without byte code from the disk, which may be of an edited file."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(KEPT[self.path], self.path)

    def get_data(self, path: str) -> bytes:
        return KEPT[path] if path in KEPT else super().get_data(path)


class _Finder(MetaPathFinder):
    """The first finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin not in KEPT:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


KEPT: dict[str, bytes] = {}  # absolute path -> source
