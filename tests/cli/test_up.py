"""`lightrl up` with real daemons: to the end, interrupted, its parent killed, with input that one refuses."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
SMALL = (
    "rollout.engine=torch",
    "rollout.nodes=1",
    "rollout.group_size=2",
    "train.prompts_per_step=2",
    "rollout.max_response_length=16",
    "eval.path=",
    "node.grace_s=10",
)
DEADLINE_S = 90.0
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="finds and awaits processes by /proc and pidfd"
)


def arguments(*more: str) -> list[str]:
    return [sys.executable, "-m", "lightrl.cli", *more]


@contextlib.contextmanager
def running(tmp_path: Path, *overrides: str) -> Iterator["subprocess.Popen[str]"]:
    command = arguments("up", str(QUICKSTART), "run.name=one", *SMALL, *overrides, "--no-tui")
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
    return [os.pidfd_open(child) for child in below] + [fd for child in below for fd in descendants(child)]


def all_end(descriptors: list[int]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
        if not ended:
            return False
    return True


def test_a_run_to_its_end(tmp_path):
    with running(tmp_path, "train.steps=2") as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert "step     2/2  reward" in out
    assert "finished 2 steps in" in out
    run_dir = tmp_path / "runs" / "one"
    assert f"  run        {run_dir}" in out
    [model] = [line.split()[1] for line in out.splitlines() if line.startswith("  model ")]
    assert (Path(model) / "model.safetensors").exists()
    assert (tmp_path / "runs" / "latest").resolve() == run_dir
    status = subprocess.run(arguments("status"), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "step      2/2" in status.stdout


@linux_only
def test_an_interrupted_run_stops_its_daemons_and_says_so(tmp_path):
    with running(tmp_path, "train.steps=100000", "rollout.engine=emulated") as process:
        until(process, "reward")
        below = descendants(process.pid)
        assert len(below) >= 6  # three daemons, an engine, a training rank, a reward worker
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert "stopping ..." in out
        assert "interrupted at step" in out
        assert "Traceback" not in out
        assert all_end(below)


@linux_only
def test_daemons_leave_when_the_process_that_started_them_is_killed(tmp_path):
    with running(tmp_path, "train.steps=100000", "rollout.engine=emulated") as process:
        until(process, "reward")
        below = descendants(process.pid)
        process.kill()
        assert all_end(below)


def test_malformed_data_is_one_line_and_leaves_no_run_behind(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "11%8=", "answer": "03"}\n{"prompt": \n')
    with running(tmp_path, "data.path=bad.jsonl") as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    first, line = out.splitlines()
    assert first.startswith("run one in ")
    assert line.startswith("lightrl: ")
    assert "bad.jsonl, line 2: not valid JSON" in line
    assert not (tmp_path / "runs" / "one").exists()
