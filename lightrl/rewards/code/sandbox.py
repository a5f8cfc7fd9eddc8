"""A sandbox from outside: starts its first process, gives it programs, and ends it.

Owns how long is waited for an answer and how much memory all processes inside have together. Must
not know what the programs are for, nor run anything of them here. What is inside is in `inside.py`.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from lightrl.errors import RewardError
from lightrl.rewards.code import inside
from lightrl.system.memory import resident_bytes

START_LIMIT_S = 30.0
GRACE_S = 2.0  # after a program's limit, to collect what it wrote
LOOK_S = 0.05  # between two looks at the memory inside
PYTHON = os.path.realpath(sys.executable)

Status = Literal["exited", "timeout", "output", "memory", "refused", "crashed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one program, but `memory_bytes`, which all processes inside share."""

    memory_bytes: int = 1 << 30
    disk_bytes: int = 64 << 20
    output_bytes: int = 4 << 20
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. `code`: its exit status, or minus the signal that ended it.

    Example: Outcome("exited", 0, b"42\\n", "", 0.013)
    """

    status: Status
    code: int
    output: bytes
    # the end of what it wrote to stderr
    errors: str
    wall_s: float


class Sandbox:
    """A context manager: `run` as often as wanted, and nothing inside outlives the end.

    A program that kills the first process, or fills the memory, costs the sandbox: `run` then
    answers "crashed" or "memory", and a new one is needed.
    """

    def __init__(
        self, limits: Limits, is_isolated: bool = True, packages: Sequence[str] = ()
    ) -> None:
        """`packages`: folders that programs may read beside the standard library. Not isolated: a
        program has its limits, but sees and may do what its user may.

        Raises RewardError where the kernel has no room for one or refuses it.
        """
        self._limits = limits
        self._packages = packages
        self._folder = "" if is_isolated else tempfile.mkdtemp(prefix="lightrl-code-")
        self.is_alive = True
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [PYTHON, "-I", "-S", inside.__file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket.settimeout(START_LIMIT_S)
        binds, links = _visible(packages)
        try:
            setup = {
                "folder": self._folder,
                "binds": binds,
                "links": links,
                "disk_bytes": limits.disk_bytes,
            }
            inside.send(self._socket, setup)
            answer, _ = inside.receive(self._socket)
        except (EOFError, OSError) as e:
            self.close()
            raise RewardError(f"code: the sandbox does not start: {e or 'it has ended'}") from None
        if "refused" in answer:
            self.close()
            raise RewardError(
                f"code: this kernel refuses a sandbox ({answer['refused']}): allow user namespaces "
                "(user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or set "
                "reward.code.unisolated = true if programs may do whatever you may"
            )

    @property
    def first_pid(self) -> int:
        """Of the process that all others inside end with."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: str, time_s: float, stdin: bytes, files: Mapping[str, bytes]) -> Outcome:
        """Writes `files` (names without folders) to the working directory and runs `program`, which
        is one of them, with Python for at most `time_s` seconds."""
        environment = {"PYTHONHASHSEED": "0"}  # sets have the same order in every run
        if self._packages:
            environment["PYTHONPATH"] = ":".join(self._packages)
        request = {
            "argv": [PYTHON, "-P", "-s", "-S", "-X", "utf8", program],
            "environment": environment,
            "time_s": time_s,
            "files": [(name, len(data)) for name, data in files.items()],
            "memory_bytes": self._limits.memory_bytes,
            "file_bytes": self._limits.disk_bytes,
            "output_bytes": self._limits.output_bytes,
            "processes": self._limits.processes,
        }
        self._socket.settimeout(time_s + GRACE_S)
        try:
            inside.send(self._socket, request, b"".join((*files.values(), stdin)))
            if not self._await_answer(time_s + GRACE_S):
                return self._lost("memory")
            answer, output = inside.receive(self._socket)
        except (EOFError, OSError):
            return self._lost("crashed")
        return Outcome(answer["status"], answer["code"], output, answer["errors"], answer["wall_s"])

    def _await_answer(self, limit_s: float) -> bool:
        """False if there is too much memory in use inside. Raises OSError if nobody answers."""
        until = time.monotonic() + limit_s
        while not select.select([self._socket], [], [], LOOK_S)[0]:
            if _resident_bytes(self._process.pid) > self._limits.memory_bytes:
                return False
            if time.monotonic() > until:
                raise TimeoutError
        return True

    def _lost(self, status: Status) -> Outcome:
        self.close()
        return Outcome(status, 0, b"", "", 0.0)

    def close(self) -> None:
        """Kills everything inside and waits until it has gone."""
        self.is_alive = False
        self._socket.close()
        for pid in (*_descendants(self._process.pid), self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _visible(packages: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What a program needs to start Python: folders and files to read, and links between them."""
    libraries = [p for p in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if os.path.exists(p)]
    links = {p: os.readlink(p) for p in libraries if os.path.islink(p)}
    wanted = [p for p in libraries if p not in links]
    wanted += ["/etc/ld.so.cache", "/etc/localtime", PYTHON]
    wanted += [os.path.realpath(os.path.join(sys.base_prefix, "lib")), *packages]
    wanted = sorted({p for p in wanted if os.path.exists(p)})
    # Some lie within others.
    return [p for p in wanted if not any(p.startswith(f"{q}/") for q in wanted)], links


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found[1:]


def _resident_bytes(pid: int) -> int:
    return sum(map(resident_bytes, _descendants(pid)))
