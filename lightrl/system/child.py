"""A child process that a daemon supervises, and the pipe between the two: both ends.

Owns how heavy work (an engine, a training rank, a reward worker) is kept out of the daemon's event
loop and how it is made sure that no child outlives its daemon: the child dies with its parent
(Linux: parent-death signal) and ends when its end of the pipe closes; one that runs others' code
has a reaper besides (reaper.py). Knows nothing of what is said through the pipe: each user brings a
closed union of commands and one of events.

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
from lightrl.system.imports import importing
from lightrl.system.silence import silent_for
from lightrl.wire import Codec

logger = logging.getLogger(__name__)

Command = TypeVar("Command")
Event = TypeVar("Event")
Started = TypeVar("Started")

LACKING = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}  # others may set it free
START_AGAIN_S = 1.0
FOR_THE_DAEMON = (signal.SIGTERM, signal.SIGHUP)  # a child heeds its pipe
NO_THREAD = "can't start new thread"  # a RuntimeError, and the only words that tell it from others

REAPER = str(Path(__file__).with_name("reaper.py"))
NOBODY = 0  # in place of a parent's process id: the reaper sees to it, or a sandbox has other ids

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class ChildDied(LightRLError):
    """Nothing more is to be expected of the child; the text says how it ended, or that it hangs."""


class Child(Generic[Command, Event]):
    """The daemon's end. Use `await Child.start(...)`; always `await stop()`."""

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
        """Starts `target` ("package.module:function", called with a `Pipe`'s socket) in a new
        process.

        `env` is added to `inherited`, by default all of this process's environment; stdout and
        stderr go to the end of `log`. `within` is for a child that runs others' code: nothing that
        it starts outlives it or this process (Linux), and these words, a sandbox and its options,
        stand before its command line.
        """
        is_reaped = within is not None and sys.platform == "linux"
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            kept = stack.enter_context(contextlib.ExitStack())
            kept.callback(ours.close)
            out = stack.enter_context(log.open("ab")) if log else None
            number = str(theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                *((sys.executable, "-I", "-S", REAPER, number) if is_reaped else ()),
                *(within or ()),
                sys.executable,
                "-P",  # what lies in the working directory is not ours to import
                "-c",
                "from lightrl.system.child import run; run()",
                name,
                target,
                number,
                str(NOBODY if within is not None else os.getpid()),
                pass_fds=(theirs.fileno(),),
                env={**(os.environ if inherited is None else inherited), **(env or {})},
                stdin=asyncio.subprocess.PIPE if is_reaped else asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # ctrl-C is for the daemon; the daemon tells its children
            )
            kept.pop_all()
        open_files.restore_for(process.pid)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return cls(name, process, reader, writer, commands, events, log)

    def send(self, command: Command) -> None:
        """Queues a command; a dead child is noticed by `receive`."""
        self.forward(self._commands.encode(command))

    def forward(self, frame: bytes) -> None:
        """As `send`, of a command that is encoded already."""
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def receive(self) -> Event:
        """The next event. Raises ChildDied when there will be no more."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            frame = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildDied(await self._exit_reason()) from None
        self._num_received += 1
        return self._events.decode(frame)

    async def require_answers(self, owes: Callable[[], bool], limit_s: float) -> NoReturn:
        """Raises ChildDied when the child `owes` an answer and says nothing for `limit_s`; it may
        still live.

        Needs somebody who receives. Time is counted in looks: a daemon that was stopped itself,
        together with its child or without it, must not take the gap for the child's silence.
        """
        await silent_for(owes, lambda: self._num_received, limit_s)
        raise ChildDied(f"{self.name} (pid {self.pid}) hangs: no answer for {limit_s:g} s")

    async def stop(self, grace_s: float = 5.0) -> int:
        """Closes the pipe, waits `grace_s` for the child to end, then kills it with its own
        children."""
        self._writer.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:  # also when cancelled
            if self._writer.transport.get_write_buffer_size():
                self._writer.transport.abort()  # a child that does not read would keep it open
            if self._process.returncode is None or self._process.stdin is not None:
                self.kill()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to the child and all processes of its session; to all that it started if it is
        reaped."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.stdin is None:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.stdin.close()
                self._process.send_signal(signal.SIGCONT)  # whoever has stopped it

    async def _exit_reason(self) -> str:
        """How the child ended, with the last line it printed."""
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


async def retry_on_resource_limit(
    start: Callable[[], Awaitable[Started]], what: str, report: Callable[[str], None]
) -> Started:
    """What `start` returns: called again and again while this machine lacks descriptors, processes,
    threads or memory.

    `report` gets one line for each such reason: "`what` cannot be started: ...". Raises any other
    error.
    """
    told: set[str] = set()
    while True:
        try:
            return await start()
        except (OSError, RuntimeError) as e:
            if not is_for_lack(e):
                raise
            reason = getattr(e, "strerror", None) or str(e)
            if reason not in told:
                told.add(reason)
                report(f"{what} cannot be started: {reason}; trying again")
        await asyncio.sleep(START_AGAIN_S)


def is_for_lack(error: Exception) -> bool:
    """Whether the same call may do later, when this machine has again what it lacks now."""
    if isinstance(error, OSError):
        return error.errno in LACKING
    return isinstance(error, RuntimeError) and NO_THREAD in str(error)


class Pipe(Generic[Command, Event]):
    """The child's end: plain blocking calls, so that a child needs no event loop."""

    def __init__(self, sock: socket.socket, commands: Codec[Command], events: Codec[Event]) -> None:
        self._sock = sock
        self._commands = commands
        self._events = events
        self._buffer = bytearray()

    def send(self, *events: Event) -> None:
        """Blocks while the parent is behind. Raises EOFError if it is gone."""
        frames = map(self._events.encode, events)
        try:
            self._sock.sendall(b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the parent closed the pipe") from None

    def receive(self, timeout_s: float | None = None) -> list[Command]:
        """All commands that have arrived, in order; waits up to `timeout_s` for the first (None:
        for ever).

        Raises EOFError when the parent closed the pipe and all commands were returned.
        """
        commands = self._parse()
        if commands:
            timeout_s = 0.0
        while select.select([self._sock], [], [], timeout_s)[0]:
            try:
                data = self._sock.recv(1 << 20)
            except (
                ConnectionResetError
            ):  # closed by a parent that had not read all that was sent to it
                data = b""
            if not data:
                if commands:
                    return commands
                raise EOFError("the parent closed the pipe")
            self._buffer += data
            commands += self._parse()
            if commands:
                timeout_s = 0.0
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
    """What a child process executes: argv = name, target, file descriptor, pid of the parent."""
    _, target, descriptor, parent = sys.argv[1:5]
    if int(parent) != NOBODY:
        die_with(int(parent))
    configure(inherited())
    os.environ.pop(ENVIRONMENT, None)  # what others' code starts here logs as it likes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A preempted job's SIGTERM reaches every process, but only the daemon decides when to stop; the
    # same goes for SIGHUP. A handler and not SIG_IGN, which the programs that user code starts
    # would inherit.
    for number in FOR_THE_DAEMON:
        if signal.getsignal(number) == signal.SIG_DFL:  # not after nohup
            signal.signal(number, _ignore)
    # Forked helpers heed them again, also if one comes at once: multiprocessing's `terminate`
    # counts on that.
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_release_signals, after_in_child=_heed_signals
    )
    logger.debug("%s starts", target)
    module, _, function = target.partition(":")
    with importing():
        main = getattr(importlib.import_module(module), function)
    with socket.socket(fileno=int(descriptor)) as sock:
        main(sock)


def _ignore(number: int, frame: object) -> None:
    pass


def _hold_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DAEMON)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_DAEMON)


def _heed_signals() -> None:
    for number in FOR_THE_DAEMON:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)
    _release_signals()


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends (Linux; elsewhere the closed pipe ends
    it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        raise SystemExit(f"parent process {parent} is gone")
