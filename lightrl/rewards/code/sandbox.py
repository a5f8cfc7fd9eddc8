"""Sandboxes for programs of responses: bubblewrap, resource limits, and a limit of time.

Owns the view of a program and its limits; `inside.py` is what runs inside. Must not run anything of
a program here.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from lightrl.errors import RewardError
from lightrl.rewards.code import inside
from lightrl.system.process import resident_bytes
from lightrl.system.temporary import temporary_folder

LOOK_S = 0.05  # between two looks at the memory of a program
STDERR_BYTES = 2000  # of its end: what went wrong
OPEN_FILES = 64
STACK_BYTES = 64 << 20
NOBODY = "65534"
PYTHON = os.path.realpath(sys.executable)
SOURCE = Path(inside.__file__).read_text()
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", sys.base_prefix)
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")
UNISOLATED = "or set reward.code.unisolated = true if programs may do whatever you may"

Status = Literal["exited", "timeout", "output", "memory"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one program. `memory_bytes`: of each process, and of all together."""

    memory_bytes: int = 1 << 30
    disk_bytes: int = 64 << 20
    output_bytes: int = 4 << 20
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. `code`: its exit status; not 0 if a signal has ended it.

    Example: Outcome("exited", 0, b"42\\n", "", 0.013)
    """

    status: Status
    code: int
    output: bytes
    # the end of what it wrote to stderr
    errors: str
    wall_s: float

    @property
    def has_finished(self) -> bool:
        return self.status == "exited" and self.code == 0


class Sandbox:
    """Runs programs, each in a sandbox of its own that ends with it.

    Not isolated, processes that a program has moved to sessions of their own stay until the reward
    worker ends.
    """

    def __init__(
        self, limits: Limits, is_isolated: bool = True, packages: Sequence[str] = ()
    ) -> None:
        """`packages`: folders that programs may import from. Not isolated: a program has its
        limits, but may do whatever its user may.

        Raises RewardError, one line, where no sandbox can be had.
        """
        self._limits = limits
        self._is_isolated = is_isolated
        self._packages = packages
        self._walls = _walls(limits, packages) if is_isolated else []
        tried = self.run({"mode": "input", "program": ""}, 30.0)
        errors = tried.errors.strip()
        if not tried.has_finished and errors.startswith("bwrap: "):
            raise RewardError(
                f"code: bubblewrap (0.7 or newer) makes no sandbox ({errors}): allow user "
                "namespaces (user.max_user_namespaces, "
                f"kernel.apparmor_restrict_unprivileged_userns), {UNISOLATED}"
            )
        if not tried.has_finished:
            raise RewardError(f"code: no program runs: {errors or tried.status}")

    def run(
        self,
        request: dict[str, Any],
        time_s: float,
        stdin: bytes = b"",
        served: dict[str, Any] | None = None,
    ) -> Outcome:
        """Runs the program of a request to `inside.py` for at most `time_s` seconds. `served`: the
        request of a second sandbox, to which the first one is connected by its standard input."""
        with contextlib.ExitStack() as opened:
            given, out, err = (opened.enter_context(_file(data)) for data in (stdin, b"", b""))
            began = time.monotonic()
            if served is None:
                processes = [self._start(opened, request, time_s, given, out, err)]
            else:
                one, other = socket.socketpair()
                nowhere = subprocess.DEVNULL
                with one, other:
                    processes = [
                        self._start(opened, request, time_s, one, out, err),
                        self._start(opened, served, time_s, other, nowhere, nowhere),
                    ]
            status = self._wait(processes, began + time_s)
            wall_s = time.monotonic() - began
            for process in processes:
                _end(process)
            code = processes[0].returncode
            output = _head(out, self._limits.output_bytes + 1)
            if len(output) > self._limits.output_bytes:
                status, output = "output", output[:-1]
            errors = _tail(err, STDERR_BYTES)
        return Outcome(status, code, output, errors, wall_s)

    def _start(
        self,
        opened: contextlib.ExitStack,
        request: dict[str, Any],
        time_s: float,
        *streams: Any,
    ) -> subprocess.Popen[bytes]:
        folder = "/"
        if not self._is_isolated:
            folder = str(opened.enter_context(temporary_folder("code")))
        given = opened.enter_context(_file(json.dumps(request).encode()))
        environment = {"PYTHONHASHSEED": "0"}  # sets have the same order in every run
        if self._packages:
            environment["PYTHONPATH"] = ":".join(self._packages)
        limits = _limit_command(self._limits, time_s)
        python = [PYTHON, "-P", "-s", "-S", "-X", "utf8", "-c", SOURCE, str(given.fileno())]
        process = subprocess.Popen(
            [*self._walls, *limits, *python],
            pass_fds=(given.fileno(),),
            env=environment,
            cwd=folder,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
        )
        opened.callback(_end, process)
        return process

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]], until: float) -> Status:
        """Until the first of them has ended."""
        ended = os.pidfd_open(processes[0].pid)
        try:
            waiting = select.poll()
            waiting.register(ended, select.POLLIN)
            while not waiting.poll(1000 * max(0.0, min(LOOK_S, until - time.monotonic()))):
                if time.monotonic() >= until:
                    return "timeout"
                used = sum(resident_bytes(pid) for each in processes for pid in _tree(each.pid))
                if used > self._limits.memory_bytes:
                    return "memory"
        finally:
            os.close(ended)
        return "exited"


def _walls(limits: Limits, packages: Sequence[str]) -> list[str]:
    """The command that makes a sandbox. If root starts it, the program runs as the user nobody, in
    a user namespace so that only processes inside count for its limit."""
    command = shutil.which("bwrap")
    if command is None:
        raise RewardError(
            "code: needs bubblewrap, which is not installed (Debian and Ubuntu: apt install "
            f"bubblewrap; Fedora: dnf install bubblewrap), {UNISOLATED}"
        )
    walls = [command, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    walls += ["--unshare-cgroup-try", "--die-with-parent", "--new-session"]
    walls += ["--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    binds = [("--ro-bind-try", path) for path in (*READABLE, *packages)]
    for option, path in [*binds, *(("--dev-bind", device) for device in DEVICES)]:
        for parent in reversed(Path(path).parents[:-1]):
            walls += ["--perms", "0755", "--dir", str(parent)]
        walls += [option, path, path]
    walls += ["--remount-ro", "/", "--chdir", "/tmp"]
    if os.geteuid() != 0:
        return [*walls, "--unshare-user", "--"]
    walls += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--"]
    walls += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return [*walls, "unshare", "--user"]


def _limit_command(limits: Limits, time_s: float) -> list[str]:
    values = {
        "as": limits.memory_bytes,
        "fsize": limits.disk_bytes,
        "nproc": limits.processes,
        "cpu": int(time_s) + 1,
        "nofile": OPEN_FILES,
        "stack": STACK_BYTES,
        "core": 0,
    }
    return ["prlimit", *(f"--{name}={value}" for name, value in values.items())]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills it and what it started; what is inside a sandbox ends with it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _file(data: bytes) -> IO[bytes]:
    """Without a name."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.seek(0)
    return file


def _head(file: IO[bytes], size: int) -> bytes:
    file.seek(0)
    return file.read(size)


def _tail(file: IO[bytes], size: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read().decode(errors="replace")


def _tree(pid: int) -> list[int]:
    """A process and its descendants, whichever of their threads has started them."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                found += map(int, children.split())
    return found
