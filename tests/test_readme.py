"""The READMEs are true where that can be checked: files that they name, the walk, errors that they
quote."""

import ast
import re
from pathlib import Path

import pytest

from lightrl.config.run_file import load_config

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PACKAGES = sorted(p.parent for p in (ROOT / "lightrl").rglob("__init__.py"))
READMES = [
    README,
    ROOT / "configs" / "README.md",
    ROOT / "scripts" / "README.md",
    *(p / "README.md" for p in PACKAGES),
]
MAX_LINES = 200
FEWEST, MOST = 10, 40  # lines of a folder's README, up to its first "Reference"
MAX_WALK = 7
MAX_COLUMNS = 120


def section(title: str) -> list[str]:
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"README.md has no section {title}"
    return found[1].splitlines()


def walk() -> dict[Path, str]:
    """The files of the ordered list in "Where things are", and what each of them is entered by."""
    found = [
        re.match(r"(\d+)\. `([^`]+)`: `(\w+)` .", line) for line in section("Where things are")
    ]
    steps = [(int(m[1]), ROOT / m[2], m[3]) for m in found if m is not None]
    assert [number for number, _, _ in steps] == list(range(1, len(steps) + 1))
    return {path: entry for _, path, entry in steps}


def folder_map() -> list[str]:
    """Folders with a line of their own, or that share one."""
    lines = [line for line in section("Where things are") if line.startswith("- `")]
    return [name for line in lines for name in re.findall(r"`([^`]+/)`", line.partition(":")[0])]


def parsed(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imported(file: Path) -> set[Path]:
    """Files of LightRL that one imports, wherever in it."""
    modules: set[str] = set()
    for node in parsed(file):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            modules |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
    return {
        ROOT / f"{module.replace('.', '/')}.py"
        for module in modules
        if module.startswith("lightrl.")
    }


def called(file: Path) -> set[str]:
    functions = [node.func for node in parsed(file) if isinstance(node, ast.Call)]
    names = {f.id for f in functions if isinstance(f, ast.Name)}
    return names | {f.attr for f in functions if isinstance(f, ast.Attribute)}


def defined(file: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in parsed(file) if isinstance(node, kinds)}


def strings(folder: Path) -> list[str]:
    """All literal text in the code of a folder, docstrings included."""
    constants = [
        n.value for f in folder.rglob("*.py") for n in parsed(f) if isinstance(n, ast.Constant)
    ]
    return [value for value in constants if isinstance(value, str)]


def test_the_walk_exists_and_is_short_enough():
    files = list(walk())
    assert [path for path in files if not path.is_file()] == []
    assert 2 <= len(files) <= MAX_WALK
    assert files[0] == ROOT / "lightrl" / "cli.py"
    assert files[-1] == ROOT / "lightrl" / "core" / "responses" / "placement.py"


def test_the_walk_leaves_no_file_out():
    files = list(walk())
    for at, (file, entry) in enumerate(walk().items()):
        assert entry in defined(file), f"{file.relative_to(ROOT)} has no {entry}"
        callers = [path for path in files[:at] if file in imported(path) and entry in called(path)]
        assert callers or at == 0, (
            f"{entry} of {file.relative_to(ROOT)} is called by no file before it"
        )


def test_the_map_names_every_folder_of_the_package_and_no_other():
    named = folder_map()
    assert [name for name in named if not (ROOT / name).is_dir()] == []
    assert len(named) == len(set(named))
    wanted = {f"{package.relative_to(ROOT)}/" for package in PACKAGES}
    assert wanted - set(named) == set()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_folder_of_the_package_tells_what_lives_there(package: Path):
    lines = (package / "README.md").read_text(encoding="utf-8").splitlines()
    told = next((i for i, line in enumerate(lines) if line.startswith("## Reference")), len(lines))
    assert FEWEST <= told <= MOST
    text = "\n".join(lines)
    for part in ("**Not here:**", "**How data passes through.**", "**Begin with**"):
        assert part in text, part


@pytest.mark.parametrize("readme", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_links_in_a_readme_exist(readme: Path):
    """Code is named from the root, from lightrl/, or from beside the README."""
    text = readme.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+\.py)`", text))
    places = (ROOT, ROOT / "lightrl", readme.parent)
    assert [name for name in sorted(named) if not any((p / name).is_file() for p in places)] == []
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in links if not (readme.parent / target).exists()] == []


def test_the_readme_can_be_read_in_ten_minutes():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_no_line_but_of_a_table_is_wider_than_a_screen(readme: Path):
    lines = readme.read_text(encoding="utf-8").splitlines()
    wide = [n for n, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS and line[0] != "|"]
    assert wide == []


def test_commands_that_others_rely_on_are_there():
    text = README.read_text(encoding="utf-8")
    assert "\n./scripts/quickstart " in text
    assert "\n./scripts/test " in text


def test_common_errors_are_those_that_the_code_says():
    errors = [
        m[1] for line in section("Ten common errors") if (m := re.match(r"\| `([^`]+)` \|", line))
    ]
    assert len(errors) == 10
    said = strings(ROOT / "lightrl")
    assert [e for e in errors if not any(e in text for text in said)] == []


def test_the_config_that_is_shown_is_one(tmp_path: Path):
    shown = re.search(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    file = tmp_path / "run.toml"
    file.write_text(shown[1], encoding="utf-8")
    assert load_config(file).train.prompts_per_step == 128
