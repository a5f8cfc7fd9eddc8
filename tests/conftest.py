"""Settings that all tests share, and the line at the end of a run that says what was not tested.

Nothing here starts a process.
"""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.support.warm import origin_of_daemons, warm_daemons

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes run side by side on few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")

__all__ = ["origin_of_daemons", "warm_daemons"]  # fixtures

# What is imported while tests are collected stays: to look through it for garbage again and again
# takes as long as all the rest of a collection.
gc.disable()

_SKIPPED = "Skipped: "


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A machine without root, TUN, Slurm, vLLM or a GPU tests less: a green run must not hide
    that."""
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(not_tested([(r.nodeid, reason(r.longrepr)) for r in skipped]))


def reason(longrepr: object) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix(_SKIPPED)


def not_tested(skipped: list[tuple[str, str]]) -> str:
    """One line from (test, reason) of each test that was skipped; a file with all its reasons
    counts once.

    Example: "not tested here: 3 of tests/slurm/test_jobs.py (no slurmctld here)"
    """
    counts = Counter((test.partition("::")[0], " ".join(why.split())) for test, why in skipped)
    if not counts:
        return "not tested here: nothing, no test was skipped"
    parts = [
        f"{count} of {Path(file).as_posix()} ({why})"
        for (file, why), count in sorted(counts.items())
    ]
    return f"not tested here: {'; '.join(parts)}"
