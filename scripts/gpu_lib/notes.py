"""Reports what a part of scripts/gpu finds: figures, and, as a pytest plugin, the outcome of its
tests.

Does nothing outside scripts/gpu. Needs nothing but the standard library.
"""

import json
import os
from typing import Any

FILE = "LIGHTRL_GPU_NOTES"


def note(**values: Any) -> None:
    if FILE in os.environ:
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def figure(name: str, value: float | int | str | bool) -> None:
    """One number (or word) that the machine showed. Example: figure("0.5b, batch 64: tokens/s",
    41_000.0)."""
    print(f"{name}: {value}", flush=True)
    note(figure=name, value=value)


def pytest_runtest_logstart(nodeid: str) -> None:
    note(test=nodeid, outcome="begun")


def pytest_runtest_logreport(report: Any) -> None:
    if report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        note(test=report.nodeid, outcome="skipped", why=why.removeprefix("Skipped: "))
    elif report.failed:
        note(test=report.nodeid, outcome="failed", why=f"{_reason(report)} ({report.when})"[:400])
    elif report.when == "call":
        note(test=report.nodeid, outcome="passed")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        note(
            test=report.nodeid,
            outcome="failed",
            why=f"cannot be collected: {str(report.longrepr)[-300:]}",
        )


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason")
