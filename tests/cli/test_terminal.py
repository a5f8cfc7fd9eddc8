"""A terminal that is stopped, as by ctrl-S or a hanging ssh line, and one that goes away."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrl.client.address import listening
from lightrl.metrics import sinks
from lightrl.system.process import stop_signals
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    SMALL,
    Victims,
    all_end,
    arguments,
    descendants,
    linux_only,
    read_until,
    started,
)

pytestmark = linux_only
ENDLESS = (*SMALL, "run.name=one", *EMULATED, "train.steps=100000")


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Its two ends: what is written to the second one can be read from the first."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(theirs)
        os.close(ours)


def wait_for_steps(tmp_path: Path, more: int) -> None:
    """So many more than have been done until now."""
    wanted, deadline = None, time.monotonic() + DEADLINE_S
    while wanted is None or _steps(tmp_path) < wanted:
        assert time.monotonic() < deadline, f"still at step {_steps(tmp_path)}"
        if wanted is None:
            wanted = _steps(tmp_path) + more
        time.sleep(0.05)


def _steps(tmp_path: Path) -> int:
    file = tmp_path / "runs" / "one" / sinks.FILE_NAME
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def state(tmp_path: Path) -> tuple[str, str]:
    ended = json.loads((tmp_path / "runs" / "one" / "summary.json").read_bytes())
    return ended["state"], ended["reason"]


@pytest.mark.e2e
def test_a_coordinator_in_the_foreground_goes_on_while_its_terminal_is_stopped(tmp_path):
    with terminal() as (ours, theirs):
        command = ("up", str(QUICKSTART), *ENDLESS, "--role", "coordinator,trainer,rollout")
        with started(tmp_path, *command, terminal=theirs) as process:
            read_until(ours, b"step 1:")
            termios.tcflow(theirs, termios.TCOOFF)
            wait_for_steps(tmp_path, 20)
            termios.tcflow(theirs, termios.TCOON)
            done = _steps(tmp_path)
            said = read_until(ours, f"step {done}:".encode())  # nothing is missing of what fits
            assert all(f"step {step}:".encode() in said for step in range(done - 10, done))
            termios.tcflow(theirs, termios.TCOOFF)
            process.send_signal(signal.SIGHUP)
            assert process.wait(DEADLINE_S) == 1
    assert state(tmp_path) == ("stopped", "SIGHUP")


@pytest.mark.e2e
def test_a_run_goes_on_and_its_daemons_are_kept_while_the_terminal_is_stopped(tmp_path):
    with (
        terminal() as (ours, theirs),
        started(tmp_path, "up", str(QUICKSTART), *ENDLESS, terminal=theirs) as process,
    ):
        read_until(ours, b"tok/s")
        termios.tcflow(theirs, termios.TCOOFF)
        wait_for_steps(tmp_path, 20)
        termios.tcflow(theirs, termios.TCOON)
        os.write(ours, b"3")
        read_until(ours, b"newest first")  # a screen of now, whatever was not read
        os.write(ours, b"q")
        read_until(ours, b"the run continues; ctrl-C stops it")
        termios.tcflow(theirs, termios.TCOOFF)
        victims = Victims(process)
        victims.pid("rollout-0", besides=victims.kill("rollout-0"))  # another one has been started
        wait_for_steps(tmp_path, 10)
        below = descendants(process.pid)
        process.send_signal(signal.SIGHUP)
        assert process.wait(DEADLINE_S) == 1
        assert all_end(below)
    assert state(tmp_path) == ("stopped", "interrupted")


@pytest.mark.e2e
def test_a_node_and_a_run_leave_in_order_when_their_terminals_are_gone(tmp_path):
    with (
        in_a_terminal(tmp_path, "up", str(QUICKSTART), *ENDLESS, "rollout.nodes=0") as (
            screen,
            run,
        ),
        in_a_terminal(tmp_path, "up", "--join", address(tmp_path), "--key", "runs/one/key") as (
            its,
            node,
        ),
    ):
        read_until(screen, b"tok/s")
        wait_for_steps(tmp_path, 3)
        os.close(its)  # and the kernel sends SIGHUP
        assert node.wait(DEADLINE_S) == 0
        below = descendants(run.pid)
        os.close(screen)
        assert run.wait(DEADLINE_S) == 1
        assert all_end(below)
    assert state(tmp_path) == ("stopped", "interrupted")
    events = json.loads((tmp_path / "runs" / "one" / "snapshot.json").read_bytes())["events"]
    assert [text for _, text in events if " drains (SIGHUP)" in text]


def test_after_nohup_the_end_of_the_terminal_is_no_signal_to_stop(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", {signal.SIGHUP: signal.SIG_DFL}.get)
    assert signal.SIGHUP in stop_signals()
    monkeypatch.setattr(signal, "getsignal", {signal.SIGHUP: signal.SIG_IGN}.get)
    assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}


def address(tmp_path: Path) -> str:
    """Where the run listens, as soon as it does."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := listening(tmp_path / "runs" / "one")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def in_a_terminal(tmp_path: Path, *command: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """Of its own, which is gone when the descriptor is closed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", *arguments(*command)],
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        try:
            yield ours, process
        finally:
            process.kill()
