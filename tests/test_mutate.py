"""The bugs of scripts/mutations.py fit the present code."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
THERE = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))
MUTATIONS: list[Any] = THERE["MUTATIONS"]
SOURCE = '''\
LIMIT = 4


class Table:
    def add(self, é, most):
        """Docstrings are no nodes."""
        if é and most >= LIMIT:  # kept
            return min(é, most - 1)
        self.log("é", end="é"); self.stop()
'''


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.bug)
def test_it_can_be_planted(mutation: Any):
    planted = mutation.planted(ROOT)
    assert planted != (ROOT / mutation.file).read_bytes()
    compile(planted, mutation.file, "exec")
    assert mutation.tests
    for test in mutation.tests:
        assert (ROOT / test).is_file(), test


def test_there_are_sixty_different_ones():
    assert len({m.bug for m in MUTATIONS}) == len({m.planted(ROOT) for m in MUTATIONS}) == 60


@pytest.mark.parametrize(
    ("address", "change", "old", "new"),
    [
        (("LIMIT", ""), THERE["give"](9), "LIMIT = 4", "LIMIT = 9"),
        (("Table.add", "if"), THERE["never"], "é and most >= LIMIT", "False"),
        (("Table.add", "if"), THERE["only"](1), "é and most >= LIMIT", "(é)"),
        (("Table.add", "if compare"), THERE["operator"](">"), "most >= LIMIT", "(most > LIMIT)"),
        (("Table.add", "compare"), THERE["plus"](1), "most >= ", "(most + 1) >= "),
        (("Table.add", "return"), THERE["swap"](1, 2), "min(é, most - 1)", "(min(most - 1, é))"),
        (("Table.add", "call 1"), THERE["without"](2), "min(é, most - 1)", "(min(é))"),
        (("Table.add", "arithmetic"), THERE["swap"](1, 2), "most - 1", "(1 - most)"),
        (("Table.add", "do 2"), THERE["drop"], "self.stop()", "pass"),
        (("Table.add", "keyword end"), THERE["always"], 'end="é"', "end=True"),
    ],
)
def test_one_node_is_replaced_and_the_rest_stays(
    tmp_path: Path, address: tuple[str, str], change: Any, old: str, new: str
):
    assert planted(tmp_path, address, change) == SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        (("Table.get", "if"), "a.b Table.get: no 'get'; there are add"),
        (("Tables", ""), "a.b Tables: no 'Tables'; there are LIMIT, Table"),
        (
            ("Table.add", "do"),
            "add: 'do' is not one node; there are [do 1: self.log('é', end='é'); ",
        ),
        (("Table.add", "if 1 call 2"), "'call 2' is not one node; there are [call 1: min(é, "),
    ],
)
def test_a_wrong_address_is_one_line_with_what_is_there(
    tmp_path: Path, address: tuple[str, str], line: str
):
    with pytest.raises(THERE["AddressError"]) as e:
        planted(tmp_path, address, THERE["drop"])
    assert line in str(e.value)


def planted(folder: Path, address: tuple[str, str], change: Any) -> str:
    file = folder / "lightrl" / "a" / "b.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE, encoding="utf-8")
    return THERE["Mutation"]("a.b", *address, change, "a bug", ()).planted(folder).decode()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_planted_bug_is_caught():
    command = [sys.executable, str(ROOT / "scripts" / "mutate"), "--jobs", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.stdout, "its tests fail without any bug"
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["survived"], found["not_tried"]) == ([], [])
