"""Child processes that are forked where their imports are done: torch is imported once for many.

An origin is a process that has imported some modules and done nothing else. While it lasts, a
child that `system.child` starts with a target in one of them, or that runs one by `python -m`, is
forked there instead of being begun by an interpreter of its own. All else is as it
always is: it is a child of the test's process (CLONE_PARENT), has an environment, descriptors,
limits, a session and command line of its own, runs what it would have run, and dies with its parent
(tests/system/test_warm.py compares the two). A child that wants another number of threads than one
is started as always, and so is each where this cannot be done.

A `lightrl` that is forked has an origin of its own, a child that it has forked before it did
anything: its daemons, engines and ranks are forked there in turn. That one ends with it.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from asyncio.unix_events import _UnixSubprocessTransport  # type: ignore[attr-defined]
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

CLONE_PARENT = 0x00008000
SIGCHLD = 17
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # the number of the system call
READY, HAS_THREADS = b"ready", b"threads"  # one of them is the first that an origin sends
ROOM = 500  # characters of a command line, which a child writes over that of its origin
REQUEST_BYTES = 1 << 17
MAX_DESCRIPTORS = 16
ASIDE = 100  # what lies after this, and after all that a child is to have, is in nobody's way
CHILD_CODE = "from lightrl.system.child import run; run()"
CLI = "lightrl.cli"
DAEMONS = (CLI, "lightrl.daemon.main")
CHILDREN = (
    "lightrl.engine.model_dir",
    "lightrl.engine.process",
    "lightrl.engine.torch.engine",
    "lightrl.trainer.rank.rank",
    "lightrl.trainer.rank.emulated",
    "lightrl.trainer.rank.evaluated",
    "lightrl.rewards.worker",
    "lightrl.trainer.model.lora",
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
)
FOR_THE_DAEMON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
UNSHARE = ["unshare", "--mount", "--uts"]
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
PRIVATE = "mount --make-rprivate / && umount -l /sys && mount -t sysfs sysfs /sys"
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)
THREADS = "OMP_NUM_THREADS"  # libraries read it when they are imported
PATH = "PYTHONPATH"


class Forks:
    """What asks an origin to fork."""

    def __init__(self, requests: socket.socket, modules: Sequence[str]) -> None:
        self._requests, self._modules = requests, modules
        self._path = os.environ.get(PATH)
        self._start = subprocess._fork_exec  # type: ignore[attr-defined]
        self._one_at_a_time = threading.Lock()

    def close(self) -> None:
        self._requests.close()

    def can_fork(self, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Not one for which a library, or Python itself, is to find something else."""
        is_as_here = environment.get(THREADS) == "1" and environment.get(PATH) == self._path
        return is_as_here and _can_be_forked(words, self._modules)

    def fork_exec(self, args: Sequence[bytes], *rest: Any) -> int:
        """In place of subprocess's own."""
        wanted, descriptors = _wanted([os.fsdecode(arg) for arg in args], rest)
        if self.can_fork(wanted.words, wanted.environment):
            return self._fork(wanted, descriptors)
        return self._start(args, *rest)

    def receive(self) -> bytes:
        answer = self._requests.recv(REQUEST_BYTES)
        if not answer:
            raise ChildProcessError("the origin of warm children is gone")
        return answer

    def _fork(self, wanted: "Wanted", descriptors: list[int]) -> int:
        data = json.dumps(asdict(wanted)).encode()
        with self._one_at_a_time:
            socket.send_fds(self._requests, [data], descriptors)
            return int(self.receive())


class Origin:
    """A process that has imported these modules."""

    def __init__(self, *modules: str) -> None:
        self._answer = b""  # READY or HAS_THREADS
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forks = Forks(requests, modules)
        code = "from tests.support.warm import serve; serve()()"
        words = ("-c", code, str(theirs.fileno()), ",".join(modules), " " * ROOM)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, *words),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, THREADS: "1"},
            )

    def close(self) -> None:
        self._forks.close()
        self._process.wait()

    @contextlib.contextmanager
    def forks(self) -> Iterator[None]:
        """Until the end, children that it can fork are forked.

        None is where the imports have started threads, as pyarrow does: a fork would not have them.
        """
        self._wait_for_imports()
        with pytest.MonkeyPatch.context() as patch:
            if self._answer == READY:
                patch.setattr(subprocess, "_fork_exec", self._forks.fork_exec)
            yield

    def _wait_for_imports(self) -> None:
        """Now, not when the first child is to be forked: that happens in an event loop, which
        answers nobody meanwhile."""
        self._answer = self._answer or self._forks.receive()


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
    # a network namespace, a script and what that is called with (lines.py, machines.py); or nothing
    machine: list[str]


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


def _can_be_forked(words: Sequence[str], modules: Sequence[str]) -> bool:
    is_child = list(words[1:4]) == ["-P", "-c", CHILD_CODE] and words[5].split(":")[0] in modules
    return is_child or (_module(words) or ("",))[0] in modules


def _module(words: Sequence[str]) -> list[str] | None:
    """The module that `python -m` or `python -P -m` runs, and its arguments."""
    rest = list(words[2:] if words[1:2] == ["-P"] else words[1:])
    return rest[1:] if rest[:1] == ["-m"] and len(rest) > 1 else None


def _wanted(words: list[str], rest: Sequence[Any]) -> tuple[Wanted, list[int]]:
    """A child, and what its descriptors are here. `rest`: see subprocess.py."""
    _, _, kept, cwd, env, stdin, _, _, stdout, _, stderr, _, errors, _, new_session, *_ = rest
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in os.environb.items()}
    if env is not None:
        environment = dict(os.fsdecode(pair).split("=", 1) for pair in env)
    machine: list[str] = []
    if words[:3] == ["ip", "netns", "exec"] and words[4:9] == [*UNSHARE, "sh", "-c"]:
        machine, words = [words[3], *words[9:11]], words[11:]
    streams = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
    others = [n for n in kept if n != errors]
    limits = {n: resource.getrlimit(n) for n in LIMITS}
    folder = os.path.join(os.getcwd(), os.fsdecode(cwd or ""))
    is_leader = bool(new_session)
    wanted = Wanted(words, environment, folder, limits, is_leader, others, machine)
    return wanted, streams + others


def serve() -> Callable[[], None]:
    """The origin: forks until the test's process closes its end. Returns in the children only: what
    they are to do."""
    _, number, names, _ = sys.argv
    modules = names.split(",")
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=int(number))
    if len(os.listdir("/proc/self/task")) > 1:
        requests.send(HAS_THREADS)
        sys.exit()
    requests.send(READY)
    return _serve(requests, modules)


def _serve(requests: socket.socket, modules: Sequence[str]) -> Callable[[], None]:
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            os._exit(0)  # nothing is to be saved, and to take down what was imported takes seconds
        wanted = Wanted(**json.loads(data))
        pid = _fork_beside()
        if pid == 0:
            requests.close()
            _become(wanted, descriptors)
            is_daemon = (_module(wanted.words) or [""])[0] == CLI
            if is_daemon and len(modules) > len(DAEMONS):
                return _with_origin(wanted, modules)
            return _ending(_work(wanted.words))
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _with_origin(wanted: Wanted, modules: Sequence[str]) -> Callable[[], None]:
    """What a `lightrl` is to do whose children are forked; in the children, too."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heeded = {n: signal.getsignal(n) for n in FOR_THE_DAEMON}
    if os.fork() == 0:
        # what its daemon is told by a terminal or by Slurm, it is told, too
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)
        _call_itself("origin")
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        for descriptor in (nothing, *wanted.descriptors):
            os.close(descriptor)
        work = _serve(theirs, modules)
        for number, action in heeded.items():
            signal.signal(number, action)
        return work
    theirs.close()
    forks = Forks(ours, modules)
    subprocess._fork_exec = forks.fork_exec  # type: ignore[attr-defined]
    _fork_in_uvloop(forks)
    return _ending(_work(wanted.words))


def _ending(work: Callable[[], None]) -> Callable[[], None]:
    """Ends the process as the interpreter does, but does not take down what was imported: each
    would have its own copy of the memory that is written to for that, in a second."""

    def run() -> None:
        code: object = 0
        try:
            work()
        except SystemExit as e:
            code = e.code
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - as the interpreter itself
            sys.excepthook(*sys.exc_info())
            code = 1
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))

    return run


def _fork_in_uvloop(forks: Forks) -> None:
    """Its loop starts children by itself: those that can be forked are started as asyncio does."""
    start = uvloop.Loop.subprocess_exec

    async def subprocess_exec(
        self: uvloop.Loop, factory: Callable[[], Any], *words: Any, **options: Any
    ) -> Any:
        if not forks.can_fork([os.fsdecode(w) for w in words], options.get("env") or os.environ):
            return await start(self, factory, *words, **options)
        streams = [options.pop(name) for name in ("stdin", "stdout", "stderr")]
        options.setdefault("bufsize", 0)
        protocol, waiter = factory(), self.create_future()
        transport = _UnixSubprocessTransport(
            self, protocol, words, False, *streams, waiter=waiter, **options
        )
        pid = transport.get_pid()
        ended = os.pidfd_open(pid)

        def reap() -> None:
            self.remove_reader(ended)
            os.close(ended)
            try:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            except ChildProcessError:  # whoever sent it a signal has found that it had ended
                code = transport._proc.returncode
            transport._process_exited(code)

        self.add_reader(ended, reap)
        await waiter
        return transport, protocol

    uvloop.Loop.subprocess_exec = subprocess_exec  # type: ignore[method-assign]


def _work(words: list[str]) -> Callable[[], None]:
    if "-P" in words[:2]:
        sys.path[:] = [folder for folder in sys.path if folder]
    if (run := _module(words)) is not None:
        module = sys.modules[run[0]]
        sys.argv = [str(module.__file__), *run[1:]]
        if run[0] == CLI:
            return module.main
        del sys.modules[run[0]]  # runpy does not want it to be there
        return lambda: runpy.run_module(run[0], run_name="__main__", alter_sys=True) and None
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
    tempfile.tempdir = None  # as that says
    os.chdir(wanted.folder)
    if wanted.machine:
        _enter(*wanted.machine)
    _call_itself("\0".join(wanted.words))


def _enter(space: str, script: str, name: str) -> None:
    """As `ip netns exec` and unshare do; the script ends with `exec "$@"`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as file:
        failed = libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS)
    if failed:
        raise OSError(ctypes.get_errno(), f"{space} cannot be entered")
    subprocess.run(("sh", "-c", f"{PRIVATE} && {script}", name, "true"), check=True)


def _call_itself(text: str) -> None:
    """Writes over what the kernel shows as the command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, 48 and 49 of all
    data = text.encode()[: end - begin - 1]
    ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


@pytest.fixture(scope="session")
def origin_of_daemons() -> Iterator[Origin | None]:
    with origin(*DAEMONS) as process:
        yield process


@pytest.fixture(scope="session")
def origin_of_runs() -> Iterator[Origin | None]:
    with origin(*DAEMONS, *CHILDREN) as process:
        yield process


@pytest.fixture
def warm_runs(origin_of_runs: Origin | None) -> Iterator[None]:
    """As `warm_daemons`, and whatever a `lightrl` starts is forked, too: daemons, torch engines,
    ranks."""
    with forking(origin_of_runs):
        yield


@pytest.fixture
def warm_daemons(origin_of_daemons: Origin | None) -> Iterator[None]:
    """Daemons that a test starts with `python -m lightrl.cli` are forked."""
    with forking(origin_of_daemons):
        yield
