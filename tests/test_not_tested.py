"""The end of a test run says in one line what this machine could not test."""

import os
import subprocess
import sys
from pathlib import Path

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
