"""The sizes of files, functions and folders: see tests/budgets.toml."""

import ast
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightrl"
BUDGETS = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text(encoding="utf-8"))
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [f for f in FILES if f.name != "__init__.py"]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_longer_than_its_budget():
    sizes = {name_of(f): num_lines(f) for f in FILES}
    limits = BUDGETS["longer_files"]
    too_long = {
        n: size for n, size in sizes.items() if size > limits.get(n, BUDGETS["lines_of_file"])
    }
    assert too_long == {}


def test_exceptions_are_removed_when_they_are_needed_no_more():
    sizes = {name_of(f): num_lines(f) for f in FILES}
    limits = BUDGETS["longer_files"]
    assert [n for n in limits if sizes.get(n, 0) <= BUDGETS["lines_of_file"]] == []


def test_no_function_is_longer_than_its_budget():
    too_long = {
        f"{name_of(f)}:{node.name}": length
        for f in FILES
        for node in ast.walk(ast.parse(f.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > BUDGETS["lines_of_function"]
    }
    assert too_long == {}


def test_no_constructor_has_more_parameters_than_its_budget():
    too_many = {
        f"{name_of(f)}:{node.lineno}": num
        for f in FILES
        for node in ast.walk(ast.parse(f.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name == "__init__"
        and (num := len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1)
        > BUDGETS["parameters_of_constructor"]
    }
    assert too_many == {}


def test_every_folder_keeps_to_its_budget():
    lines: Counter[str] = Counter()
    for f in FILES:
        lines[name_of(f).split("/")[0] if f.parent != PACKAGE else "."] += num_lines(f)
    limits = BUDGETS["lines_of_folder"]
    assert set(lines) - set(limits) == set(), "a new folder has a budget, too"
    assert {folder: size for folder, size in lines.items() if size > limits[folder]} == {}


def test_no_folder_has_more_files_than_its_budget():
    files = Counter(f.parent.relative_to(PACKAGE).as_posix() for f in MODULES)
    assert {f: n for f, n in files.items() if n > BUDGETS["files_of_folder"]} == {}


def test_small_files_are_joined_with_what_they_serve():
    sizes = {name_of(f): num_lines(f) for f in MODULES}
    small = {n for n, size in sizes.items() if size < BUDGETS["least_lines_of_file"]}
    assert small == set(BUDGETS["small_files"])


def test_one_name_of_a_class_means_one_thing():
    trees = [ast.parse(f.read_text(encoding="utf-8")) for f in FILES]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = Counter(each.name for each in classes if not each.name.startswith("_"))
    assert [name for name, num in names.items() if num > 1] == []
