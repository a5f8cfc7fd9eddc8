"""Runs parts: each in a process of its own, within its limit and the time that is left for all.

Owns those processes and their time; what a part finds it writes itself, line by line, so that
nothing of a part that is killed is lost. Needs nothing but the standard library.

A line of a part's notes is a JSON object: {"figure": name, "value": number} or {"test": id,
"outcome": "begun", "passed", "failed" or "skipped", "why": text}.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu_lib.notes import FILE
from gpu_lib.parts import ROOT, Part

DEVICE = "LIGHTRL_GPU_DEVICE"  # environment variable: cuda, or cpu with tiny shapes
DYING_S = 10.0  # for the tracebacks of one that is stopped
NO_TESTS = 5  # pytest's exit status


@dataclass
class Result:
    part: Part
    state: Literal["passed", "failed", "skipped"]
    # in one line, of a part that failed or was skipped
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    # tests
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    # test -> why
    skipped: dict[str, str] = field(default_factory=dict)
    # of all parts together, not by its own limit
    lacked_time: bool = False


class Runner:
    def __init__(self, device: str, seconds: float, log: Path) -> None:
        self._device = device
        self._end = time.monotonic() + seconds
        self._log = log
        self._writing = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(
        self, parts: Sequence[Part], jobs: int, refusal: Callable[[Part], str | None]
    ) -> list[Result]:
        """In the order of `parts`; `jobs` tests at a time, then what is timed, one by one."""

        def one(part: Part) -> Result:
            why = refusal(part)
            result = Result(part, "skipped", why) if why else self._one(part)
            print(f"{part.name}: {describe(result)}", file=sys.stderr, flush=True)
            return result

        tests = [part for part in parts if not part.is_timed]
        with ThreadPoolExecutor(jobs) as threads, self._killed_by_an_interrupt():
            found = dict(zip(tests, threads.map(one, tests), strict=True))
        with self._killed_by_an_interrupt():
            found |= {part: one(part) for part in parts if part.is_timed}
        return [found[part] for part in parts]

    @contextlib.contextmanager
    def _killed_by_an_interrupt(self) -> Iterator[None]:
        """Parts have a session of their own, which ctrl-C does not reach."""
        try:
            yield
        except KeyboardInterrupt:
            self._end = 0.0
            for process in list(self._running):
                _kill(process)
            raise

    def _one(self, part: Part) -> Result:
        limit_s = min(part.limit_s, self._end - time.monotonic())
        if limit_s < min(part.least_s, part.limit_s):
            why = f"{max(0.0, limit_s):.0f} s were left, it needs {part.least_s:.0f}"
            return Result(part, "skipped", why, lacked_time=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lightrl-gpu-") as folder:
            notes, output = Path(folder) / "notes.jsonl", Path(folder) / "output"
            status = self._process(part, limit_s, notes, output)
            text = output.read_text(errors="replace")
            result = read(part, status, notes, text, limit_s)
        result.seconds = time.monotonic() - started
        result.lacked_time = status is None and limit_s < part.limit_s
        with self._writing, self._log.open("a") as log:
            log.write(f"\n{'=' * 20} {part.name}: {describe(result)}\n{text}")
        return result

    def _process(self, part: Part, limit_s: float, notes: Path, output: Path) -> int | None:
        """The exit status; None if it had to be stopped."""
        environment = {**os.environ, FILE: str(notes), DEVICE: self._device, **ENVIRONMENT}
        paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self._device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *part.command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stack
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(DYING_S)
                return None
            finally:
                _kill(process)
                process.wait()
                self._running.discard(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """It, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # imports of a second process are quicker
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def read(part: Part, status: int | None, notes: Path, output: str, limit_s: float) -> Result:
    """What has become of a part, by its exit status (None: stopped), its notes and what it printed
    last."""
    result = Result(part, "passed")
    begun = ""
    for line in notes.read_text().splitlines() if notes.exists() else ():
        try:
            note = json.loads(line)
        except ValueError:  # the last line of a part that was killed
            continue
        if "figure" in note:
            result.figures[note["figure"]] = note["value"]
            continue
        begun = note["test"]
        match note["outcome"]:
            case "passed":
                result.passed += 1
            case "failed":
                result.failed.append(f"{begun}: {note['why']}")
            case "skipped":
                result.skipped[begun] = note["why"]
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")[:200]
    if status is None:
        result.state, result.why = (
            "failed",
            f"not done within {limit_s:.0f} s" + (f", in {begun}" if begun else ""),
        )
    elif result.failed:
        more = f" (and {len(result.failed) - 1} more)" if len(result.failed) > 1 else ""
        result.state, result.why = "failed", result.failed[0] + more
    elif status == 0 and result.skipped and not result.passed:
        result.state, result.why = "skipped", "; ".join(sorted(set(result.skipped.values())))
    elif status == NO_TESTS and "pytest" in part.command:
        result.state, result.why = "skipped", "no test of it is for this device"
    elif status:
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        result.state, result.why = "failed", f"{how}: {last}"
    return result


def describe(result: Result) -> str:
    tests = [f"{result.passed} passed"] if result.passed else []
    tests += [f"{len(result.failed)} failed"] if result.failed else []
    tests += [f"{len(result.skipped)} skipped"] if result.skipped else []
    if result.state == "skipped" and not tests:
        return f"skipped: {result.why}"
    about = ", ".join(tests) or result.state
    return f"{about} in {result.seconds:.0f} s" + (f"; {result.why}" if result.why else "")
