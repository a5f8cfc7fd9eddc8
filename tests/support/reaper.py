"""Ends what tests leave behind when they are interrupted: daemons of runs, a Slurm cluster.

Owns how such a process is known: by a variable in the environment that it was started with, which
its children inherit wherever they go, into sessions of their own, too. The reaper is a process
beside pytest, in its own session, so that Ctrl-C and a SIGKILL of pytest do not end it.

    python reaper.py NAME_OF_VARIABLE PID_OF_PYTEST
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

TERM_S = 5.0  # until SIGKILL
LOOK_S = 0.05
ENDS_S = 20.0  # pytest waits so long for the reaper


class Reaper:
    """Call `end` when no test runs any more."""

    def __init__(self) -> None:
        """What is started from now on is marked."""
        name = f"LIGHTRL_TESTS_{uuid.uuid4().hex[:12]}"
        # Without the mark: it is not to end itself.
        command = [sys.executable, "-I", "-S", __file__, name, f"{os.getpid()}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[name] = "1"

    def end(self) -> None:
        """Returns when nothing marked is left."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            # A byte: children that were forked may hold the pipe open.
            self._process.communicate(b"\n", ENDS_S)


def marked(name: bytes) -> set[int]:
    """Pids of the processes that were started with the variable, zombies left out."""
    found = set[int]()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
            if b"\0" + name + b"=" in b"\0" + environment.read():
                found.add(int(pid))
    return found


def reap(name: bytes) -> None:
    """SIGTERM, and SIGKILL for what has not ended then."""
    deadline, commands = time.monotonic() + TERM_S, dict[int, str]()
    while left := marked(name):
        new = left - commands.keys()
        commands |= {pid: command(pid) for pid in new}
        is_late = time.monotonic() > deadline
        for pid in left if is_late else new:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        time.sleep(LOOK_S)
    if commands:
        what = f"{len(commands)} processes that tests had left: {'; '.join({*commands.values()})}"
        print(f"ended {what}", file=sys.stderr, flush=True)


def command(pid: int) -> str:
    """The end of its command line."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return line.replace("\0", " ").strip()[-80:]
    return "?"


def main(name: str, pytest: int) -> None:
    ends = select.poll()
    ends.register(sys.stdin.fileno(), select.POLLIN)
    with contextlib.suppress(OSError):  # it has ended already
        ends.register(os.pidfd_open(pytest), select.POLLIN)
        ends.poll()
    reap(name.encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
