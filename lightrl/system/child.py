"""Supervised child processes, and both ends of the pipe to them.

Engines, training ranks and reward workers run in child processes, outside the daemon's event loop.
A child never outlives its daemon: it gets a parent-death signal (Linux) and ends when its pipe
closes; a child that runs user code has a reaper as well (reaper.py). Each user of this module
passes a union of commands and one of events.

A frame is 4 bytes of length, little-endian, and one `wire.Codec` frame.
"""

import asyncio
import contextlib
import ctypes
import errno
import importlib
import logging
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NoReturn, Self, TypeVar

from lightrl.errors import LightRLError
from lightrl.log import ENVIRONMENT, configure, inherited, last_line
from lightrl.system import open_files
from lightrl.system.process import importing
from lightrl.system.timeouts import silent_for
from lightrl.wire import Codec

logger = logging.getLogger(__name__)

Command = TypeVar("Command")
Event = TypeVar("Event")
Started = TypeVar("Started")

LACKING = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}  # temporary lack of resources
START_AGAIN_S = 1.0
FOR_THE_DAEMON = (signal.SIGTERM, signal.SIGHUP)  # a child ends with its pipe instead
NO_THREAD = "can't start new thread"  # text of a RuntimeError, which has no errno

REAPER = str(Path(__file__).with_name("reaper.py"))
NOBODY = 0  # instead of the parent's pid: a reaper is used, or a sandbox with other pids

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class ChildDied(LightRLError):
    """The child has ended or hangs; the text names the exit status or signal."""


class Child(Generic[Command, Event]):
    """The daemon's end. Create it with `await Child.start(...)`, and always `await stop()`."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        commands: Codec[Command],
        events: Codec[Event],
        log: Path | None,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer
        self._commands = commands
        self._events = events
        self._log = log
        self._num_received = 0

    @classmethod
    async def start(
        cls,
        target: str,
        name: str,
        commands: Codec[Command],
        events: Codec[Event],
        env: dict[str, str] | None = None,
        log: Path | None = None,
        inherited: Mapping[str, str] | None = None,
        within: Sequence[str] | None = None,
    ) -> Self:
        """Start `target` ("package.module:function", called with a `Pipe`'s socket) in a new
        process.

        `env` is added to `inherited`, by default the environment of this process; stdout and stderr
        are appended to `log`. `within` is for a child that runs user code: its words, a sandbox and
        its options, precede the command line, and no process that the child starts outlives it or
        this process (Linux).
        """
        run = "from lightrl.system.child import run; run()"
        # -P: do not import from the working directory
        program = [*(within or ()), sys.executable, "-P", "-c", run, name, target]
        runs_user_code = within is not None
        return await cls.start_program(
            program, name, commands, events, env, log, inherited, runs_user_code
        )

    @classmethod
    async def start_program(
        cls,
        program: Sequence[str],
        name: str,
        commands: Codec[Command],
        events: Codec[Event],
        env: dict[str, str] | None = None,
        log: Path | None = None,
        inherited: Mapping[str, str] | None = None,
        runs_user_code: bool = True,
    ) -> Self:
        """Start any program, whose last two arguments become the descriptor of its socket and the
        pid of the process that it has to end with (NOBODY: it need not care)."""
        is_reaped = runs_user_code and sys.platform == "linux"
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            kept = stack.enter_context(contextlib.ExitStack())
            kept.callback(ours.close)
            out = stack.enter_context(log.open("ab")) if log else None
            number = str(theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                *((sys.executable, "-I", "-S", REAPER, number) if is_reaped else ()),
                *program,
                number,
                str(NOBODY if runs_user_code else os.getpid()),
                pass_fds=(theirs.fileno(),),
                env={**(os.environ if inherited is None else inherited), **(env or {})},
                stdin=asyncio.subprocess.PIPE if is_reaped else asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # only the daemon receives ctrl-C; it closes the pipes
            )
            kept.pop_all()
        open_files.restore_for(process.pid)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return cls(name, process, reader, writer, commands, events, log)

    def send(self, command: Command) -> None:
        """Queue a command; `receive` reports a dead child."""
        self.forward(self._commands.encode(command))

    def forward(self, frame: bytes) -> None:
        """Queue an encoded command."""
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def receive(self) -> Event:
        """Return the next event. Raises ChildDied when the child has ended."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            frame = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildDied(await self._exit_reason()) from None
        self._num_received += 1
        return self._events.decode(frame)

    async def require_answers(self, owes: Callable[[], bool], limit_s: float) -> NoReturn:
        """Raise ChildDied when the child `owes` an answer and sends nothing for `limit_s`.

        Another task must be receiving. See `silent_for` for how time is counted.
        """
        await silent_for(owes, lambda: self._num_received, limit_s)
        raise ChildDied(f"{self.name} (pid {self.pid}) hangs: no answer for {limit_s:g} s")

    async def stop(self, grace_s: float = 5.0) -> int:
        """Close the pipe, wait `grace_s` for the child to end, then kill it with its children."""
        self._writer.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        finally:  # also when cancelled
            if self._writer.transport.get_write_buffer_size():
                self._writer.transport.abort()  # a child that does not read would keep it open
            if self._process.returncode is None or self._process.stdin is not None:
                self.kill()
        with contextlib.suppress(ConnectionError):
            # a cancelled wait would cancel those of later calls, too
            await asyncio.shield(self._writer.wait_closed())
        return await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the child's session; with a reaper, to all processes that it started."""
        kill_session(self._process)

    async def _exit_reason(self) -> str:
        """Return how the child ended, with the last line that it printed."""
        try:
            async with asyncio.timeout(5.0):  # `wait_for` of Python 3.11 may drop a cancel
                code = await self._process.wait()
        except TimeoutError:
            self.kill()
            return f"{self.name} (pid {self.pid}) closed its pipe without ending"
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        how = killed or f"ended with exit status {code}"
        last = last_line(self._log)[:300] if self._log else ""
        return f"{self.name} (pid {self.pid}) {how}" + (f": {last}" if last else "")


def kill_session(process: asyncio.subprocess.Process) -> None:
    """Send SIGKILL to the session of a process; if it is a reaper, which has a pipe as its stdin,
    let it end all processes below it."""
    with contextlib.suppress(ProcessLookupError):
        if process.stdin is None:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.stdin.close()
            process.send_signal(signal.SIGCONT)  # in case it was stopped


async def retry_on_resource_limit(
    start: Callable[[], Awaitable[Started]], what: str, report: Callable[[str], None]
) -> Started:
    """Call `start` until it succeeds, as long as it fails for lack of descriptors, processes,
    threads or memory.

    `report` gets one line for each such reason: "`what` cannot be started: ...". Other errors are
    raised.
    """
    reported: set[str] = set()
    while True:
        try:
            return await start()
        except (OSError, RuntimeError) as e:
            if not is_for_lack(e):
                raise
            reason = getattr(e, "strerror", None) or str(e)
            if reason not in reported:
                reported.add(reason)
                report(f"{what} cannot be started: {reason}; trying again")
        await asyncio.sleep(START_AGAIN_S)


def is_for_lack(error: Exception) -> bool:
    """Return whether the error is a temporary lack of resources of this machine."""
    if isinstance(error, OSError):
        return error.errno in LACKING
    return isinstance(error, RuntimeError) and NO_THREAD in str(error)


class Pipe(Generic[Command, Event]):
    """The child's end: blocking calls, so that a child needs no event loop."""

    def __init__(self, sock: socket.socket, commands: Codec[Command], events: Codec[Event]) -> None:
        self._sock = sock
        self._commands = commands
        self._events = events
        self._buffer = bytearray()

    def send(self, *events: Event) -> None:
        """Send events; blocks while the pipe is full. Raises EOFError if the parent has ended."""
        frames = map(self._events.encode, events)
        try:
            self._sock.sendall(b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the parent closed the pipe") from None

    def receive(self, timeout_s: float | None = None) -> list[Command]:
        """Return all commands that have arrived; wait up to `timeout_s` for the first (None: for
        ever).

        Raises EOFError when the parent has closed the pipe and all commands were returned.
        """
        commands = self._parse()
        while select.select([self._sock], [], [], 0.0 if commands else timeout_s)[0]:
            try:
                data = self._sock.recv(1 << 20)
            except ConnectionResetError:  # the parent closed before it had read everything
                data = b""
            if not data:
                if commands:
                    return commands
                raise EOFError("the parent closed the pipe")
            self._buffer += data
            commands += self._parse()
        return commands

    def _parse(self) -> list[Command]:
        commands: list[Command] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            commands.append(self._commands.decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return commands


def run() -> None:
    """Entry point of a child process: argv = name, target, file descriptor, pid of the parent."""
    _, target, descriptor, parent = sys.argv[1:5]
    if int(parent) != NOBODY:
        die_with(int(parent))
    configure(inherited())
    os.environ.pop(ENVIRONMENT, None)  # processes that user code starts do not inherit it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM of a preempted job and SIGHUP reach every process, but only the daemon decides when to
    # stop. A handler instead of SIG_IGN, which programs started by user code would inherit.
    for number in FOR_THE_DAEMON:
        if signal.getsignal(number) == signal.SIG_DFL:  # not after nohup
            signal.signal(number, _ignore)
    # Forked processes handle them by default again: multiprocessing's `terminate` relies on it.
    os.register_at_fork(
        before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_signals
    )
    logger.debug("%s starts", target)
    module, _, function = target.partition(":")
    with importing():
        main = getattr(importlib.import_module(module), function)
    with socket.socket(fileno=int(descriptor)) as sock:
        main(sock)


def _ignore(number: int, frame: object) -> None:
    pass


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DAEMON)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_DAEMON)


def _reset_signals() -> None:
    for number in FOR_THE_DAEMON:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)
    _unblock_signals()


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (Linux; elsewhere the closed pipe ends
    it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        raise SystemExit(f"parent process {parent} is gone")
