"""The READMEs are true where that can be checked: files that they name, the walk, errors that they
quote."""

import ast
import re
from collections import Counter
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

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
MAX_LINES = 180
FEWEST, MOST = 10, 40  # lines of a folder's README, up to its first "Reference"
# Files. Of the first one more than the six of a single process: the coordinator is a process of its
# own, which daemon/main.py begins.
MAX_WALKS = (7, 22, 14)
MAX_COLUMNS = 120


def section(title: str, readme: Path = README) -> list[str]:
    text = readme.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{readme} has no section {title}"
    return found[1].splitlines()


class Stop(NamedTuple):
    """One function of a walk."""

    file: Path
    function: str
    is_remote: bool  # in another process than the function before it

    @property
    def name(self) -> str:
        return f"{self.function} of {self.file.relative_to(ROOT)}"


def walks() -> list[list[Stop]]:
    """The functions of each walk in "Where things are"."""
    items = re.split(r"^- \*\*", "\n".join(section("Where things are")), flags=re.MULTILINE)
    found = [re.findall(r"(⇒)?\s*`([\w/]+\.py):(\w+)`", item) for item in items]
    return [
        [Stop(ROOT / "lightrl" / file, function, bool(arrow)) for arrow, file, function in stops]
        for stops in found
        if stops
    ]


def folder_map() -> list[str]:
    """Folders that the map names."""
    return re.findall(r"`([\w/]+/)`", "\n".join(section("Where things are")))


@cache
def parsed(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imported(file: Path) -> set[str]:
    """Names that a file imports, with the module: "lightrl.a.b.Name"."""
    found = (node for node in parsed(file) if isinstance(node, ast.ImportFrom))
    return {f"{node.module}.{name.name}" for node in found for name in node.names}


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


@cache
def all_messages() -> set[str]:
    """Messages, commands and events: what daemons and processes send each other, and the core."""
    places = [*(ROOT / "lightrl" / "messages").glob("*.py"), ROOT / "lightrl/engine/base.py"]
    places += [ROOT / "lightrl/core" / name for name in ("commands.py", "events.py")]
    places += [ROOT / "lightrl" / name / "protocol.py" for name in ("trainer", "rewards")]
    return {
        f"{module(file)}.{node.name}"
        for file in places
        for node in parsed(file)
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases)
    }


def calls(caller: Stop, stop: Stop) -> bool:
    """Whether the caller's file calls a function of this name and knows the file that has it."""
    knows = {
        name for name in imported(caller.file) if f"{name}.".startswith(f"{module(stop.file)}.")
    }
    return stop.function in called(caller.file) and (caller.file == stop.file or bool(knows))


def sends(sender: Stop, stop: Stop) -> bool:
    """Whether both files know the same message."""
    return bool(imported(sender.file) & imported(stop.file) & all_messages())


def starts(parent: Stop, stop: Stop) -> bool:
    """Whether the parent's file starts a process with this function."""
    return {module(stop.file), stop.function} <= set(literals(parent.file))


def called(file: Path) -> set[str]:
    functions = [node.func for node in parsed(file) if isinstance(node, ast.Call)]
    names = {f.id for f in functions if isinstance(f, ast.Name)}
    return names | {f.attr for f in functions if isinstance(f, ast.Attribute)}


def defined(file: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in parsed(file) if isinstance(node, kinds)}


def strings(folder: Path) -> list[str]:
    """All literal text in the code of a folder, docstrings included."""
    return [text for file in folder.rglob("*.py") for text in literals(file)]


def literals(file: Path) -> list[str]:
    constants = [node.value for node in parsed(file) if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def test_the_walks_exist_and_are_short_enough():
    """A walk may come back to a file once."""
    found = walks()
    for walk, most in zip(found, MAX_WALKS, strict=True):
        assert [stop.name for stop in walk if not stop.file.is_file()] == []
        assert len({stop.file for stop in walk}) <= most
        entered = Counter(file for file, _ in groupby(walk, key=lambda stop: stop.file))
        assert [str(file) for file, times in entered.items() if times > 2] == []
    assert found[0][0].file == ROOT / "lightrl" / "cli.py"
    assert found[0][-1].file == ROOT / "lightrl" / "core" / "responses" / "placement.py"


def test_each_function_of_a_walk_is_called_or_receives_a_message():
    for walk in walks():
        for at, stop in enumerate(walk):
            assert stop.function in defined(stop.file), f"there is no {stop.name}"
            before = walk[:at]
            is_sent = any(sends(one, stop) or starts(one, stop) for one in before)
            is_called = not stop.is_remote and any(calls(one, stop) for one in before)
            assert is_called or is_sent or at == 0, f"{stop.name} is reached by none before it"


def test_another_file_with_a_function_of_that_name_is_not_reached():
    daemon, link = ROOT / "lightrl/launch/daemons.py", ROOT / "lightrl/transport/link.py"
    assert "send" in called(daemon)
    assert not calls(Stop(daemon, "start", False), Stop(link, "send", False))


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
    lines = section("Reference: ten common errors", ROOT / "lightrl" / "launch" / "README.md")
    errors = [m[1] for line in lines if (m := re.match(r"\| `([^`]+)` \|", line))]
    assert len(errors) == 10
    said = strings(ROOT / "lightrl")
    assert [e for e in errors if not any(e in text for text in said)] == []


def test_the_config_that_is_shown_is_one(tmp_path: Path):
    shown = re.search(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    file = tmp_path / "run.toml"
    file.write_text(shown[1], encoding="utf-8")
    assert load_config(file).train.prompts_per_step == 128
