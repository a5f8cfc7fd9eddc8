"""What the core does in one place only, so that a newcomer finds it there."""

import ast
from pathlib import Path

import pytest

from lightrl.core.rounds import race

CORE = Path(race.__file__).parents[1]
RACE = {"finishers", "bound", "cut", "num_scores", "recheck_at"}


def functions(file: Path) -> list[ast.FunctionDef]:
    parsed = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [node for node in parsed if isinstance(node, ast.FunctionDef)]


def changed(file: Path) -> set[str]:
    """Attributes that a file assigns to, and those that it sorts into."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "bisect.insort":
            names.add(ast.unparse(node.args[0]).rpartition(".")[2])
    return names


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("transition(ResponseState.ABORTED)", "group_lifecycle.py"),
        ("transition(GroupState.DEFERRED)", "group_lifecycle.py"),
        ("transition(GroupState.DROPPED)", "group_lifecycle.py"),
        (".tokens.frombytes(", "arrivals.py"),
        ("transition(ResponseState.RUNNING, node)", "responses.py"),
    ],
)
def test_it_happens_in_one_place(text: str, file: str):
    counts = {p.name: p.read_text(encoding="utf-8").count(text) for p in CORE.rglob("*.py")}
    assert {name: n for name, n in counts.items() if n} == {file: 1}


def test_a_race_is_changed_by_the_group_lifecycle_alone():
    assert {p.name for p in CORE.rglob("*.py") if changed(p) & RACE} == {"group_lifecycle.py"}
    assert changed(CORE / "rounds" / "race.py") == set()


def test_commands_go_through_the_outbox():
    """Only who drives the core gets lists of them."""
    returned = {
        f"{p.name}:{f.name}"
        for p in CORE.rglob("*.py")
        for f in functions(p)
        if f.returns is not None and ast.unparse(f.returns) == "list[Command]"
    }
    assert returned == {
        "commands.py:drain",
        "coordinator.py:handle",
        "recovery.py:recover",
        "recovery.py:conclude",
    }
    taken = [
        f"{p.name}:{f.name}"
        for p in CORE.rglob("*.py")
        for f in functions(p)
        for a in f.args.args
        if a.annotation is not None and ast.unparse(a.annotation) == "list[Command]"
    ]
    assert taken == []
