"""Child processes that are forked where their imports are done: torch is imported once for many.

An origin is a process that has imported some modules and done nothing else. While it lasts, a child
that `system.child` starts with a target in the first of them is forked there instead of being begun
by an interpreter of its own. All else is as it always is: it is a child of the test's process
(CLONE_PARENT), has a session, environment, log, descriptors and command line of its own, runs
`system.child.run`, and dies with its daemon (tests/system/test_warm.py compares the two). A child
that wants another number of threads than one is started as always, and so is each where this
cannot be done.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

CLONE_PARENT = 0x00008000
SIGCHLD = 17
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # the number of the system call
ROOM = 500  # characters of a command line, which a child writes over that of its origin
REQUEST_BYTES = 1 << 17
MAX_DESCRIPTORS = 16
ASIDE = 100  # descriptors from here on are in nobody's way
CHILD_CODE = "from lightrl.system.child import run; run()"
THREADS = "OMP_NUM_THREADS"  # libraries read it when they are imported


class Origin:
    """A process that has imported these modules, of which the first one holds the targets."""

    def __init__(self, *modules: str) -> None:
        self._module = modules[0]
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests.support.warm import serve; serve(); {CHILD_CODE}"
        words = ("-c", code, str(theirs.fileno()), ",".join(modules), " " * ROOM)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, *words),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, THREADS: "1"},
            )

    def close(self) -> None:
        self._requests.close()
        self._process.wait()

    @contextlib.contextmanager
    def forks(self) -> Iterator[None]:
        """Until the end, children that it can fork are forked."""
        start = subprocess._fork_exec  # type: ignore[attr-defined]

        def fork_exec(args: Sequence[bytes], *rest: Any) -> int:
            request = _request(list(map(os.fsdecode, args)), rest, self._module)
            return self._fork(*request) if request else start(args, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "_fork_exec", fork_exec)
            yield

    def _fork(
        self, words: list[str], environment: dict[str, str], streams: list[int], kept: list[int]
    ) -> int:
        data = json.dumps([words, environment, kept]).encode()
        socket.send_fds(self._requests, [data], [*streams, *kept])
        answer = self._requests.recv(REQUEST_BYTES)
        if not answer:
            raise ChildProcessError("the origin of warm children is gone")
        return int(answer)


@contextlib.contextmanager
def origin(*modules: str) -> Iterator[Origin | None]:
    """None where nothing can be forked in this way."""
    if sys.platform != "linux" or CLONE is None:
        yield None
        return
    process = Origin(*modules)
    try:
        yield process
    finally:
        process.close()


def _request(words: list[str], rest: Sequence[Any], module: str) -> tuple[Any, ...] | None:
    """(arguments, environment, streams, other descriptors) of a child that can be forked."""
    _, _, kept, cwd, env, stdin, _, _, stdout, _, stderr, _, errors, *_ = rest
    environment = dict(os.fsdecode(pair).split("=", 1) for pair in env or ())
    is_ours = words[1:4] == ["-P", "-c", CHILD_CODE] and words[5].startswith(f"{module}:")
    if not is_ours or cwd is not None or environment.get(THREADS) != "1":
        return None
    streams = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
    return words[4:], environment, streams, [n for n in kept if n != errors]


def serve() -> None:
    """The origin: forks until the test's process closes its end. Returns in the children only."""
    _, number, modules, _ = sys.argv
    for module in modules.split(","):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=int(number))
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            sys.exit()
        words, environment, kept = json.loads(data)
        pid = _fork_beside()
        if pid == 0:
            requests.close()
            _become(words, environment, descriptors, kept)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _fork_beside() -> int:
    """As os.fork, but the child is one of this process's own parent."""
    api, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    api.PyOS_BeforeFork()
    pid = libc.syscall(CLONE, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    assert pid >= 0
    return pid


def _become(
    words: list[str], environment: dict[str, str], descriptors: list[int], kept: list[int]
) -> None:
    """What a new interpreter would be: these arguments, this environment, these descriptors."""
    os.setsid()
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ASIDE) for descriptor in descriptors]
    os.closerange(3, ASIDE)
    for descriptor, number in zip(aside, (0, 1, 2, *kept), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *words]
    sys.path[:] = [folder for folder in sys.path if folder]  # as -P has it
    _call_itself("\0".join([sys.executable, "-P", "-c", CHILD_CODE, *words]))


def _call_itself(text: str) -> None:
    """Writes over what the kernel shows as the command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, 48 and 49 of all
    data = text.encode()[: end - begin - 1]
    ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)
