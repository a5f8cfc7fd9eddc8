"""Child processes that are forked where their imports are done: torch is imported once for many.

An origin is a process that has imported some modules and done nothing else. While it lasts, a
child that `system.child` starts with a target in one of them, or a `python -m lightrl.cli` if that
is one, is forked there instead of being begun by an interpreter of its own. All else is as it
always is: it is a child of the test's process (CLONE_PARENT), has an environment, descriptors,
limits, a session and command line of its own, runs what it would have run, and dies with its parent
(tests/system/test_warm.py compares the two). A child that wants another number of threads than one
is started as always, and so is each where this cannot be done.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

CLONE_PARENT = 0x00008000
SIGCHLD = 17
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # the number of the system call
READY = b"ready"  # the first that an origin says
ROOM = 500  # characters of a command line, which a child writes over that of its origin
REQUEST_BYTES = 1 << 17
MAX_DESCRIPTORS = 16
ASIDE = 100  # what lies after this, and after all that a child is to have, is in nobody's way
CHILD_CODE = "from lightrl.system.child import run; run()"
CLI = "lightrl.cli"
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)
THREADS = "OMP_NUM_THREADS"  # libraries read it when they are imported


class Origin:
    """A process that has imported these modules."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._is_ready = False
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "from tests.support.warm import serve; serve()()"
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
        self._wait_for_imports()

        def fork_exec(args: Sequence[bytes], *rest: Any) -> int:
            request = _request([os.fsdecode(arg) for arg in args], rest, self._modules)
            return self._fork(*request) if request else start(args, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "_fork_exec", fork_exec)
            yield

    def _wait_for_imports(self) -> None:
        """Now, not when the first child is to be forked: that happens in an event loop, in which
        whoever answers others would be silent for as long."""
        if not self._is_ready:
            self._receive()
            self._is_ready = True

    def _fork(self, wanted: "Wanted", descriptors: list[int]) -> int:
        data = json.dumps(asdict(wanted)).encode()
        socket.send_fds(self._requests, [data], descriptors)
        return int(self._receive())

    def _receive(self) -> bytes:
        answer = self._requests.recv(REQUEST_BYTES)
        if not answer:
            raise ChildProcessError("the origin of warm children is gone")
        return answer


@dataclass(frozen=True)
class Wanted:
    """What makes a child beside the code that it runs."""

    # its command line
    words: list[str]
    environment: dict[str, str]
    folder: str
    limits: dict[int, tuple[int, int]]
    leads_session: bool
    # those that it has, besides 0 to 2
    descriptors: list[int]


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


def forking(process: Origin | None) -> contextlib.AbstractContextManager[None]:
    """Children are forked there; without an origin they are started as always."""
    return process.forks() if process else contextlib.nullcontext()


def _request(
    words: list[str], rest: Sequence[Any], modules: Sequence[str]
) -> tuple[Wanted, list[int]] | None:
    """A child that can be forked, and what its descriptors are here. `rest`: see subprocess.py."""
    _, _, kept, cwd, env, stdin, _, _, stdout, _, stderr, _, errors, _, new_session, *_ = rest
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in os.environb.items()}
    if env is not None:
        environment = dict(os.fsdecode(pair).split("=", 1) for pair in env)
    is_child = words[1:4] == ["-P", "-c", CHILD_CODE] and words[5].split(":")[0] in modules
    is_daemon = words[1:3] == ["-m", CLI] and CLI in modules
    if not (is_child or is_daemon) or cwd is not None or environment.get(THREADS) != "1":
        return None
    streams = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
    others = [n for n in kept if n != errors]
    limits = {n: resource.getrlimit(n) for n in LIMITS}
    wanted = Wanted(words, environment, os.getcwd(), limits, bool(new_session), others)
    return wanted, streams + others


def serve() -> Callable[[], None]:
    """The origin: forks until the test's process closes its end. Returns in the children only: what
    they are to do."""
    _, number, modules, _ = sys.argv
    for module in modules.split(","):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("the imports have started threads, which a fork would not have")
    requests = socket.socket(fileno=int(number))
    requests.send(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            os._exit(0)  # nothing is to be saved, and to take down what was imported takes seconds
        wanted = Wanted(**json.loads(data))
        pid = _fork_beside()
        if pid == 0:
            requests.close()
            _become(wanted, descriptors)
            return _work(wanted.words)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _work(words: list[str]) -> Callable[[], None]:
    if words[1:3] == ["-m", CLI]:
        module = importlib.import_module(CLI)
        sys.argv = [str(module.__file__), *words[3:]]
        return module.main
    sys.path[:] = [folder for folder in sys.path if folder]  # as -P has it
    sys.argv = words[2:3] + words[4:]
    return importlib.import_module("lightrl.system.child").run


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


def _become(wanted: Wanted, descriptors: list[int]) -> None:
    """As a new interpreter is that was started so."""
    if wanted.leads_session:
        os.setsid()
    numbers = (0, 1, 2, *wanted.descriptors)
    first = max(*numbers, ASIDE) + 1
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first) for descriptor in descriptors]
    os.closerange(3, first)
    for descriptor, number in zip(aside, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for limit, values in wanted.limits.items():
        resource.setrlimit(int(limit), values)
    os.environ.clear()
    os.environ.update(wanted.environment)
    os.chdir(wanted.folder)
    _call_itself("\0".join(wanted.words))


def _call_itself(text: str) -> None:
    """Writes over what the kernel shows as the command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, 48 and 49 of all
    data = text.encode()[: end - begin - 1]
    ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


@pytest.fixture(scope="session")
def origin_of_daemons() -> Iterator[Origin | None]:
    with origin(CLI, "lightrl.daemon.main") as process:
        yield process


@pytest.fixture
def warm_daemons(origin_of_daemons: Origin | None) -> Iterator[None]:
    """Daemons that a test starts with `python -m lightrl.cli` are forked."""
    with forking(origin_of_daemons):
        yield
