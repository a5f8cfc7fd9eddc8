"""What tests have started and left is ended, however pytest ends."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.paths import python_path

ROOT = Path(__file__).parents[1]
DEADLINE_MS = 60_000
# A daemon in a session of its own, started by a process that has ended.
CODE = """
import subprocess, sys
from tests.support.reaper import Reaper
reaper = Reaper()
daemon = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3).pid, flush=True)"
subprocess.run([sys.executable, "-c", daemon], start_new_session=True)
sys.stdin.readline()
reaper.end()
print("reaped", flush=True)
sys.stdin.readline()
"""


@contextmanager
def session() -> "Iterator[tuple[subprocess.Popen[str], int]]":
    """A process as pytest is one, and a descriptor that is readable once its daemon has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        daemon = os.pidfd_open(int(process.stdout.readline()))
        try:
            yield process, daemon
        finally:
            process.kill()
            os.close(daemon)


def ended(daemon: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(daemon, select.POLLIN)
    return bool(poll.poll(timeout_ms))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_daemons_do_not_outlive_a_session_that_is_killed(number):
    with session() as (process, daemon):
        assert not ended(daemon, 0)
        process.send_signal(number)
        assert ended(daemon, DEADLINE_MS)


def test_a_session_that_ends_waits_until_nothing_is_left():
    with session() as (process, daemon):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "reaped\n"
        assert ended(daemon, 0)
