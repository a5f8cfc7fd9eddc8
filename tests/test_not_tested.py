"""The end of a test run lists what this machine could not test, and what failed and why, in a line
each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import not_tested

ROOT = Path(__file__).parents[1]


def test_each_file_and_reason_is_named_with_its_count():
    skipped = [
        ("tests/a.py::x", "no root"),
        ("tests/a.py::y[1]", "no\nroot"),
        ("tests/b.py::z", "no TUN"),
    ]
    assert (
        not_tested(skipped)
        == "not tested here: 2 of tests/a.py (no root); 1 of tests/b.py (no TUN)"
    )


def test_a_run_in_which_nothing_was_skipped_says_so():
    assert not_tested([]) == "not tested here: nothing, no test was skipped"


def test_what_failed_is_said_with_its_reason_also_by_several_workers(tmp_path: Path):
    name = "test_with_a_name_as_long_as_a_terminal_is_wide_" + 60 * "x"
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        f"""
import pytest
@pytest.fixture
def broken(): raise OSError("no space")
def {name}(): raise ValueError("at the end " + "c" * 1000 + " the reason")
def test_setup(broken): pass
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", str(tmp_path), "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("failed in "))
    assert len(lines) == 2, done.stdout + done.stderr
    assert lines[0].startswith("failed in call: ")
    assert f"test_it.py::{name}: ValueError: at the end c" in lines[0]
    assert "the reason" in lines[0]
    assert lines[1].startswith("failed in setup: ")
    assert lines[1].endswith("test_it.py::test_setup: OSError: no space")


@pytest.mark.e2e
def test_a_machine_without_slurm_is_told_at_the_end_of_the_run_also_by_several_workers():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-n",
            "2",
            "--e2e",
            "slurm",
            "tests/slurm/test_notice.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": str(Path(sys.executable).parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("not tested here: ")]
    assert len(lines) == 1, done.stdout + done.stderr
    assert "of tests/slurm/test_notice.py (no " in lines[0]
