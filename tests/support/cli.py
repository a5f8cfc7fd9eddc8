"""`lightrl up` and its tools as processes, for tests: started, read, watched to their end."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.metrics import sinks

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
SMALL = (
    "rollout.engine=torch",
    "rollout.nodes=1",
    "rollout.group_size=2",
    "train.prompts_per_step=2",
    "rollout.max_response_length=16",
    "eval.path=",
    "run.bind=tcp://127.0.0.1:*",
    "node.grace_s=10",
)
# No process imports torch. A step takes about as long as one of the real rank: no run is over too
# soon.
EMULATED = (
    "rollout.engine=emulated",
    "train.engine=emulated",
    "rollout.engine_args={train_step_ms=30}",
)
DEADLINE_S = 90.0
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="finds and awaits processes by /proc and pidfd"
)


def arguments(*more: str) -> list[str]:
    return [sys.executable, "-P", "-m", "lightrl.cli", *more]


def running(
    tmp_path: Path, *overrides: str, resume: bool = False, **environment: str
) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
    """`lightrl up` of a small run "one", or `lightrl resume one`."""
    first = ("resume", "one") if resume else ("up", str(QUICKSTART), "run.name=one", *SMALL)
    return piped(tmp_path, *first, *overrides, "--no-tui", **environment)


@contextlib.contextmanager
def piped(folder: Path, *words: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """`lightrl WORDS` there, with a pipe for all that it says; killed in the end."""
    with subprocess.Popen(
        arguments(*words),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: "subprocess.Popen[str]", text: str) -> list[str]:
    """The lines up to the first one with `text`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"ended without {text!r}:\n{''.join(lines)}")


def descendants(pid: int) -> list[int]:
    """Process file descriptors of all below `pid`: daemons, engines, ranks, reward workers."""
    below = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [os.pidfd_open(child) for child in below] + [
        fd for child in below for fd in descendants(child)
    ]


@contextlib.contextmanager
def started(
    tmp_path: Path, *command: str, terminal: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        arguments(*command), cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(tmp_path: Path, *command: str) -> str:
    done = subprocess.run(
        arguments(*command), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return done.stdout


def wait_for_ready(tmp_path: Path, node: str) -> dict[str, int]:
    """Process ids of all daemons, once `node` is ready or at work."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        nodes = json.loads(run(tmp_path, "status", "--json"))["nodes"]
        if node in [n["name"] for n in nodes if n["state"] in {"ready", "updating"}]:
            return {n["name"]: n["pid"] for n in nodes}
    raise AssertionError(f"{node} is not ready: {nodes}")


def read_until(terminal: int, text: bytes) -> bytes:
    said = b""
    deadline = time.monotonic() + DEADLINE_S
    while text not in said:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], said
        said += os.read(terminal, 65536)
    return said


def all_end(descriptors: list[int]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
        if not ended:
            return False
    return True


def joining(lines: list[str]) -> list[str]:
    """What to give `lightrl` to join the run that has said how."""
    return lines[-1].split("lightrl ", 1)[1].split()


def summary(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "runs" / "one" / "summary.json").read_bytes())


def step(tmp_path: Path) -> int:
    """How many are done, as the run has written down."""
    return int(sinks.read(tmp_path / "runs" / "one")[-1]["step"])


def wait_for_step(tmp_path: Path, wanted: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while step(tmp_path) < wanted:
        assert time.monotonic() < deadline, f"still at step {step(tmp_path)}"
        time.sleep(0.05)


class Victims:
    """The daemons that a `lightrl up` has started, by name: whom to kill."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._pid = process.pid

    def pid(self, name: str, besides: int = 0) -> int:
        """Of the daemon that runs under this name now; waits until there is another one than
        `besides`."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for pid in self._children():
                words = _command_line(pid)
                if name.encode() in words and b"--name" in words and pid != besides:
                    return pid
            time.sleep(0.02)
        raise AssertionError(f"no daemon {name}")

    def kill(self, name: str, besides: int = 0) -> int:
        """SIGKILL, without a warning; returns the process id it had."""
        pid = self.pid(name, besides)
        os.kill(pid, signal.SIGKILL)
        return pid

    def _children(self) -> list[int]:
        return [
            int(pid)
            for pid in Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        ]


def _command_line(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []
