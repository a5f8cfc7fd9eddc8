"""The bugs that scripts/mutations.py names fit the present code."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MUTATIONS: list[Any] = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.bug)
def test_bug_can_be_planted(mutation: Any):
    source = (ROOT / "lightrl" / mutation.file).read_text(encoding="utf-8")
    assert source.count(mutation.text) == 1, (
        f"{mutation.file} must contain exactly once:\n{mutation.text}"
    )
    compile(source.replace(mutation.text, mutation.instead), mutation.file, "exec")


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.tests], ids=lambda m: m.bug)
def test_what_must_catch_it_exists(mutation: Any):
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert (
            f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
            if function
            else (ROOT / file).exists()
        )


def test_no_bug_is_planted_twice():
    assert len({m.bug for m in MUTATIONS}) == len({m[1:4] for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["core", "beyond"])
def test_every_planted_bug_is_caught(part: str):
    command = [sys.executable, str(ROOT / "scripts" / "mutate"), "--part", part, "--jobs", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.stdout, "its tests fail without any bug"
    assert json.loads(done.stdout.splitlines()[-1])["survived"] == []
