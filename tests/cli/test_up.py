"""`lightrl up` with real daemons: to the end, interrupted, its parent killed, with input that one refuses."""

import contextlib
import json
import os
import pty
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
    done = subprocess.run(arguments(*command), cwd=tmp_path, capture_output=True, text=True, check=True)
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
        assert "stopped at step" in out
        assert "(interrupted); the run is in " in out
        assert "Traceback" not in out
        assert all_end(below)


def test_a_run_stopped_by_an_operator_is_over_for_all_who_look(tmp_path):
    with running(tmp_path, "train.steps=100000", "rollout.engine=emulated") as process:
        until(process, "reward")
        ours, theirs = pty.openpty()
        with started(tmp_path, "top", "one", terminal=theirs) as top:
            said = read_until(ours, b"running")
            assert run(tmp_path, "down", "one").startswith("the run is stopping")
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1, out
            run_dir = tmp_path / "runs" / "one"
            last = out.splitlines()[-1]
            assert last.startswith("stopped at step ")
            assert last.endswith(f" of 100000 (lightrl down); the run is in {run_dir}")
            assert "lightrl: " not in out
            said += read_until(ours, b"the run is over; q leaves")
            assert b"trying again" not in said
            os.write(ours, b"q")
            assert top.wait(DEADLINE_S) == 0
        os.close(ours)
        os.close(theirs)
    assert "one · stopped" in run(tmp_path, "status", "one")


def test_a_run_goes_on_without_its_only_local_rollout_node_if_another_has_joined(tmp_path):
    with running(tmp_path, "train.steps=100000", "rollout.engine=emulated") as process:
        join = until(process, "--join ")[-1].split()[-1]
        with started(tmp_path, "up", "--join", join, "--name", "far") as far:
            until(process, "reward")
            pids = wait_for_ready(tmp_path, "far")
            os.kill(pids["rollout-0"], signal.SIGKILL)
            until(process, "reward")
            until(process, "reward")
            run(tmp_path, "down")
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert far.wait(DEADLINE_S) == 0
    assert "lost on the way: rollout-0 was killed by SIGKILL" in out
    assert "stopped at step" in out


def test_a_run_without_a_rollout_node_ends_in_one_line(tmp_path):
    with running(tmp_path, "train.steps=100000", "rollout.engine=emulated") as process:
        until(process, "reward")
        os.kill(wait_for_ready(tmp_path, "rollout-0")["rollout-0"], signal.SIGKILL)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert out.splitlines()[-1].startswith("lightrl: rollout-0 was killed by SIGKILL")


def test_a_run_of_joined_nodes_only(tmp_path):
    with running(tmp_path, "train.steps=2", "rollout.engine=emulated", "rollout.nodes=0") as process:
        join = until(process, "--join ")[-1].split()[-1]
        with started(tmp_path, "up", "--join", join) as far:
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert far.wait(DEADLINE_S) == 0
    assert process.returncode == 0, out
    assert "finished 2 steps" in out


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


def test_a_daemon_in_the_foreground_leaves_nothing_behind_if_it_refuses_its_input(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": \n')
    (tmp_path / "runs" / "before").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("before")
    command = arguments("up", str(QUICKSTART), "data.path=bad.jsonl", "--role", "coordinator,trainer")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "bad.jsonl, line 1: not valid JSON" in line
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["before", "latest"]
    assert (tmp_path / "runs" / "latest").resolve().name == "before"


def test_a_coordinator_in_the_foreground_says_how_to_join_it(tmp_path):
    command = arguments("up", str(QUICKSTART), *SMALL, "run.name=one", "--role", "coordinator")
    run_dir = tmp_path / "runs" / "one"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = until(process, "--join ")[-1]
            assert line.split()[-1] == (run_dir / "address").read_text().strip()
            assert run(tmp_path, "status", "one")
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 1
        finally:
            process.kill()
    assert (tmp_path / "runs" / "latest").resolve() == run_dir
