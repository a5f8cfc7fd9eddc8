"""Run a command that runs user code, and end every process that it has started.

A program that uses the standard library only: `reaper.py DESCRIPTOR COMMAND...` starts COMMAND,
which inherits the descriptor, and ends with the status of COMMAND, after all processes that COMMAND
has started, also those in other sessions: orphans become children of this process (Linux "child
subreaper"). It does the same as soon as stdin closes, which the daemon does, or its death. It
ignores signals that a batch system sends to all processes of a job.

SIGKILL to this process kills COMMAND, but not processes that COMMAND has moved to other sessions.
Work passed to a daemon of the system (at, docker, systemd-run) is not below this process.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time

GIVE_UP_S = 10.0  # for processes that cannot be ended: another user's, or stuck in the kernel
LOOK_S = 0.01
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LIBC = ctypes.CDLL(None)


def main() -> None:
    descriptor, command = int(sys.argv[1]), sys.argv[2:]
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (*_IGNORED, signal.SIGCHLD):
        signal.signal(number, _nothing)  # and not SIG_IGN, which COMMAND would inherit
    child = _start(command, descriptor)
    os.close(descriptor)  # so that it closes when COMMAND ends
    status: int | None = None
    while status is None and not _closes(woken):
        status, _ = _reap(child)
    last = _end_all(child)
    _end_as(status if status is not None else last)


def _start(command: list[str], descriptor: int) -> int:
    """Start the command and return its process id."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,  # a signal of COMMAND to its group does not reach us
            preexec_fn=die_with_parent,
        )
    except OSError as e:
        raise SystemExit(f"{command[0]}: cannot be started: {e.strerror}") from None
    process.returncode = 0  # `_reap` waits for it by its id
    return process.pid


def _closes(woken: int) -> bool:
    """Wait for a signal or for stdin; return whether stdin has closed."""
    ready, _, _ = select.select([0, woken], [], [])
    with contextlib.suppress(BlockingIOError):
        os.read(woken, 4096)
    return 0 in ready and not os.read(0, 4096)


def _reap(child: int) -> tuple[int | None, bool]:
    """Return the status of `child` if it has just ended, and whether children are left."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == child:
            status = ended


def _end_all(child: int) -> int | None:
    """End all descendants; return the status of `child`, if it was one of them."""
    deadline = time.monotonic() + GIVE_UP_S
    status, are_left = _reap(child)
    while are_left and time.monotonic() < deadline:
        held: set[int] = set()
        while fresh := _below() - held:  # a stopped process starts no others
            for pid in fresh:
                _signal(pid, signal.SIGSTOP)
            held |= fresh
        for pid in held:
            _signal(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
        ended, are_left = _reap(child)
        status = status if ended is None else ended
    return status


def _below() -> set[int]:
    """Return the ids of all descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        more = children.get(todo.pop(), [])
        found.update(more)
        todo += more
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_as(status: int | None) -> None:
    """End with the status of COMMAND, which the daemon reports."""
    if status is None:
        os._exit(1)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _nothing(number: int, frame: object) -> None:
    pass


if __name__ == "__main__":
    main()
