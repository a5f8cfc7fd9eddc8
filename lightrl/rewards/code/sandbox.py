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
    """Limits of one program. `memory_bytes`: of each process, and of all together."""

    memory_bytes: int = 1 << 30
    disk_bytes: int = 64 << 20
    output_bytes: int = 4 << 20
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program. `code`: its exit status; not 0 after a signal.

    Example: Ended("exited", 0, b"42\\n", "", 0.013)
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
        try:
            tried = self.run({"mode": "input", "program": ""}, 30.0)
        except RewardError as e:
            raise RewardError(
                f"{e}: version 0.7 or newer is needed, and user namespaces "
                "(user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), "
                f"{UNISOLATED}"
            ) from None
        if not tried.has_finished:
            raise RewardError(f"code: no program runs: {tried.errors.strip() or tried.status}")

    def run(self, request: dict[str, Any], time_s: float, stdin: bytes = b"") -> Ended:
        """Run the program of a request to `inside.py` for at most `time_s` seconds. Raise
        RewardError if bubblewrap fails to start it."""
        with contextlib.ExitStack() as opened:
            given, out, err, state, content = (
                opened.enter_context(_file(data))
                for data in (stdin, b"", b"", b"", json.dumps(request).encode())
            )
            folder = "/"
            if not self._is_isolated:
                folder = str(opened.enter_context(temporary_folder("code")))
            environment = {"PYTHONHASHSEED": "0"}  # sets have the same order in every run
            if self._packages:
                environment["PYTHONPATH"] = ":".join(self._packages)
            began = time.monotonic()
            process = subprocess.Popen(
                self._command(time_s, state.fileno(), content.fileno()),
                pass_fds=(state.fileno(), content.fileno()) if self._walls else (content.fileno(),),
                env=environment,
                cwd=folder,
                stdin=given,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            opened.callback(_end, process)
            status = self._wait(process, began + time_s)
            wall_s = time.monotonic() - began
            _end(process)
            output = _head(out, self._limits.output_bytes + 1)
            if len(output) > self._limits.output_bytes:
                status, output = "output", output[:-1]
            errors = _tail(err, STDERR_BYTES)
            has_failed = self._walls and status == "exited" and process.returncode
            # bubblewrap reports the exit status of each program that it has started
            if has_failed and b"exit-code" not in _head(state, STDERR_BYTES):
                raise RewardError(f"code: bubblewrap makes no sandbox ({errors.strip()})")
        return Ended(status, process.returncode, output, errors, wall_s)

    def _command(self, time_s: float, state: int, request: int) -> list[str]:
        """`state`, `request`: descriptors of bubblewrap's reports and of the request."""
        report = ["--json-status-fd", str(state)] if self._walls else []
        python = [PYTHON, "-P", "-s", "-S", "-X", "utf8", "-c", SOURCE, str(request)]
        limits = _limit_command(self._limits, time_s)
        return [*self._walls[:1], *report, *self._walls[1:], *limits, *python]

    def _wait(self, process: subprocess.Popen[bytes], until: float) -> Status:
        """Wait until the process has ended."""
        ended = os.pidfd_open(process.pid)
        try:
            waiting = select.poll()
            waiting.register(ended, select.POLLIN)
            while not waiting.poll(1000 * max(0.0, min(LOOK_S, until - time.monotonic()))):
                if time.monotonic() >= until:
                    return "timeout"
                if sum(map(resident_bytes, _tree(process.pid))) > self._limits.memory_bytes:
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
    """Return a file without a name that contains `data`."""
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
