"""Configure all tests: shared settings, their order, the end of processes that they leave, and the
last lines of a run, which list skipped tests, and failed tests with the reasons.
"""

import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.reaper import Reaper
from tests.support.warm import origin_of_daemons, origin_of_runs, warm_daemons, warm_runs

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes run in parallel on few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Examples have no deadline, since other jobs run on the machine at the same time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

__all__ = ["origin_of_daemons", "origin_of_runs", "warm_daemons", "warm_runs"]  # fixtures

# Objects that are imported during the collection remain: repeated searches for garbage among them
# would double the time of the collection.
gc.disable()

_SKIPPED = "Skipped: "
ROOT = Path(__file__).parents[1]
# The seconds of each file that takes at least RECORDED_S, as `--record-durations` last measured.
DURATIONS = Path(__file__).with_name("durations.json")
RECORDED_S = 1.0
MESSAGE_CHARACTERS = 600
IMPURE = {
    "subprocess.Popen",
    "os.fork",
    "os.posix_spawn",
    "os.exec",
    "socket.bind",
    "socket.connect",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pure", action="store_true", help="no test may use a process or a socket")
    parser.addoption(
        "--e2e",
        default="",
        metavar="FOLDER,...",
        help='folders of tests/ whose tests marked "e2e" run, too; "all" for all of them',
    )
    parser.addoption(
        "--record-durations", action="store_true", help=f"rewrite tests/{DURATIONS.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--pure"):
        sys.addaudithook(_refuse_the_impure)
    elif not hasattr(config, "workerinput"):  # before workers start, so that they inherit its mark
        config.add_cleanup(Reaper().end)
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


def _refuse_the_impure(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise AssertionError during a test; pytest itself and its workers may use processes."""
    if event in IMPURE and "PYTEST_CURRENT_TEST" in os.environ:
        raise AssertionError(f"not a pure test: {event}{arguments!r}"[:300])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked "e2e" that `--e2e` does not name. Sort the longest file first, so that
    two workers end at about the same time; the order within a file does not change."""
    folders = config.getoption("--e2e").split(",")
    selected, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (selected if _is_selected(item, folders) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = selected
    durations = json.loads(DURATIONS.read_bytes()) if DURATIONS.exists() else {}
    items.sort(key=lambda item: -durations.get(item.path.relative_to(ROOT).as_posix(), 0.0))


def _is_selected(item: pytest.Item, folders: list[str]) -> bool:
    if item.get_closest_marker("e2e") is None or "all" in folders:
        return True
    return item.path.relative_to(ROOT / "tests").parts[0] in folders


class _Recorder:
    """Record the seconds of each file, including its fixtures."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the durations. Files that did not run keep their recorded ones."""
        known = json.loads(DURATIONS.read_bytes()) if DURATIONS.exists() else {}
        found = {**known, **{f: round(s, 1) for f, s in self._seconds.items()}}
        kept = {f: s for f, s in found.items() if s >= RECORDED_S and (ROOT / f).exists()}
        ordered = sorted(kept.items(), key=lambda file: (-file[1], file[0]))
        DURATIONS.write_text(json.dumps(dict(ordered), indent=1) + "\n")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Stop the servers of multiprocessing that tests have used: they outlive this process briefly,
    and the test run reports all processes that tests have left."""
    for name in ("forkserver", "resource_tracker"):
        module = sys.modules.get(f"multiprocessing.{name}")
        if module is not None:
            getattr(module, f"_{name}")._stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the skipped tests, since a machine without root, TUN, Slurm, vLLM or a GPU tests less;
    then the failed ones, for readers who have only the end of the output."""
    stats = terminalreporter.stats
    skipped = stats.get("skipped", [])
    terminalreporter.write_line(not_tested([(r.nodeid, reason(r.longrepr)) for r in skipped]))
    for outcome in ("failed", "error"):
        for report in stats.get(outcome, []):
            terminalreporter.write_line(failed(report.nodeid, report.when, report.longrepr))


def reason(longrepr: object) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix(_SKIPPED)


def failed(nodeid: str, when: str | None, longrepr: object) -> str:
    """Return one line for a failed test, with at most MESSAGE_CHARACTERS of the reason. pytest's
    own line omits the reason if the name of the test is as long as a terminal is wide.

    Example: "failed in call: tests/core/test_a.py::test_b: AssertionError: assert 1 == 2"
    """
    crash = getattr(longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(longrepr)
    words = " ".join(message.split())
    if len(words) > MESSAGE_CHARACTERS:
        half = MESSAGE_CHARACTERS // 2
        words = f"{words[:half]} ... {words[-half:]}"
    return f"failed in {when or 'collection'}: {nodeid}: {words}"


def not_tested(skipped: list[tuple[str, str]]) -> str:
    """Return one line from the (test, reason) of each skipped test; tests of a file with the same
    reason are counted together.

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
