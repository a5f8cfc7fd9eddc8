"""A sandbox from outside: starts its first process, gives it programs, and ends it.

Owns how long is waited for an answer and how much memory all processes inside have together. Must
not know what the programs are for, nor run anything of them here. What is inside is in `inside.py`.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from lightrl.errors import RewardError
from lightrl.rewards.code import inside
from lightrl.rewards.code.system_calls import filter_of, processor
from lightrl.system.process import resident_bytes
from lightrl.system.temporary import temporary_folder

START_LIMIT_S = 30.0
GRACE_S = 2.0  # after a program's limit, to collect what it wrote
LOOK_S = 0.05  # between two looks at what is inside
CROWD = 4  # more processes than these get what others leave of the processors
LOWEST = 19  # of priorities
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
        self.is_alive = True
        numbers = processor()
        self._filter = filter_of(numbers).hex()
        self._kept = contextlib.ExitStack()  # until it is closed
        with contextlib.ExitStack() as opened:
            self._folder = (
                "" if is_isolated else str(opened.enter_context(temporary_folder("code")))
            )
            ours, theirs = socket.socketpair()
            self._socket = opened.enter_context(ours)
            with theirs:
                self._process = subprocess.Popen(
                    [PYTHON, "-I", "-S", inside.__file__, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env={},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._kept = opened.pop_all()
        self._socket.settimeout(START_LIMIT_S)
        binds, links = _visible(packages)
        try:
            setup = {
                "folder": self._folder,
                "binds": binds,
                "links": links,
                "disk_bytes": limits.disk_bytes,
                "pivot_root": numbers.pivot_root,
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
            "filter": self._filter,
        }
        self._socket.settimeout(time_s + GRACE_S)
        began = time.monotonic()
        try:
            inside.send(self._socket, request, b"".join((*files.values(), stdin)))
            if not self._await_answer(time_s + GRACE_S):
                return self._lost("memory", began)
            answer, output = inside.receive(self._socket)
        except (EOFError, OSError):
            return self._lost("crashed", began)
        return Outcome(answer["status"], answer["code"], output, answer["errors"], answer["wall_s"])

    def _await_answer(self, limit_s: float) -> bool:
        """False if there is too much memory in use inside. Raises OSError if nobody answers."""
        until = time.monotonic() + limit_s
        while not select.select([self._socket], [], [], LOOK_S)[0]:
            pids = _descendants(self._process.pid)
            if sum(map(resident_bytes, pids)) > self._limits.memory_bytes:
                return False
            if len(pids) > CROWD:  # else other responses' programs exceed their time
                _give_way(pids)
            if time.monotonic() > until:
                raise TimeoutError
        return True

    def _lost(self, status: Status, began: float) -> Outcome:
        wall_s = time.monotonic() - began
        self.close()
        return Outcome(status, 0, b"", "", wall_s)

    def close(self) -> None:
        """Kills everything inside and waits until it has gone. Once: later its process ids may be
        others'."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._socket.close()
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not _ends_within(self._process.pid, GRACE_S):  # by itself, after all others
            self._process.kill()
        self._process.wait()
        self._kept.close()


def _ends_within(pid: int, seconds: float) -> bool:
    """Of a child. Popen.wait with a limit sleeps between looks, for longer than this takes."""
    ended = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(ended, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))
    finally:
        os.close(ended)


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
    """Whichever of a process's threads has started them."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                found += map(int, children.split())
    return found[1:]


def _give_way(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, pid, LOWEST)
