"""Run `scale.command` with the number of preemptible nodes that the run wants.

Owns when it runs, and that its failures never harm the run: a command that is missing, hangs,
fails, prints without end, or starts other nodes than it should, costs one line of the log. The
number of nodes is decided in core/scaling.py.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from lightrl.config.scale import ScaleSection
from lightrl.rewards.environment import NEVER
from lightrl.system import open_files
from lightrl.system.child import is_for_lack
from lightrl.system.output import plain

logger = logging.getLogger(__name__)

WANTED = "LIGHTRL_WANTED"
MAX_LINE = 300  # characters of its output, in a warning
MAX_KEPT = 8 << 10  # bytes of its output that go into the log, of each time: the last,
MAX_LINES = 50  # in so many lines
PIPE_BYTES = 1 << 20
READ_S = 0.01  # between two reads: what prints without end takes no more of the loop than this


class ScaleCommand:
    """Call the command with the latest number, also when numbers change quickly."""

    def __init__(
        self, settings: ScaleSection, num_there: Callable[[], int], warn: Callable[[str], None]
    ) -> None:
        """`num_there`: preemptible nodes that take part; `warn` gets one line for each failure of
        the command."""
        self._settings = settings
        self._num_there = num_there
        self._warn = warn
        self._wanted = 0
        self._is_new = asyncio.Event()

    def want(self, wanted: int) -> None:
        self._wanted = wanted
        self._is_new.set()

    async def run(self) -> None:
        """Run until cancelled, which kills a running command. A failure is retried after
        `scale.every_s`, and reported again only for another reason."""
        every_s, reported = self._settings.every_s, None
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            if not self._settings.command:
                continue
            wanted, began = self._wanted, time.monotonic()
            if (problem := await self._call(wanted)) is not None:
                self._is_new.set()
                if (wanted, problem) != reported:
                    self._warn(f"scale.command for {wanted} nodes {problem}")
            reported = wanted, problem
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
            there = self._num_there()
            if problem is None and there != wanted and not self._is_new.is_set():
                self._warn(
                    f"scale.command for {wanted} nodes: {there} preemptible nodes are here "
                    f"{every_s:g} s later (a node counts if it joined with --preemptible)"
                )

    async def _call(self, wanted: int) -> str | None:
        """Run the command and return why it failed, in one line."""
        words = [*self._settings.words, str(wanted)]
        logger.info("runs %s", words)
        try:
            ours, theirs = os.pipe()
        except OSError as e:
            return f"cannot be started: {e.strerror}"
        output = None
        try:
            process = await self._start(words, wanted, theirs)
            output = _Output(ours)
            return await self._watch(process, output)
        except (OSError, RuntimeError, ValueError) as e:
            if isinstance(e, RuntimeError) and not is_for_lack(e):
                raise
            return f"cannot be started: {getattr(e, 'strerror', None) or e}"
        finally:
            os.close(theirs)
            if output is not None:
                output.close()
            os.close(ours)

    async def _start(self, words: Sequence[str], wanted: int, out: int) -> Process:
        kept = {k: v for k, v in os.environ.items() if not fnmatchcase(k, NEVER)}
        process = await asyncio.create_subprocess_exec(
            *words,
            env={**kept, WANTED: str(wanted)},
            stdin=DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        open_files.restore_for(process.pid)
        return process

    async def _watch(self, process: Process, output: "_Output") -> str | None:
        """Wait for the end of the command. Processes that it leaves behind keep running: they may
        be nodes."""
        problem, limit_s = None, self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                code = await process.wait()
            if code:
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
                problem = f"failed ({how})"
        except TimeoutError:
            problem = f"was killed: it had not ended after scale.timeout_s = {limit_s:g}"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        lines = output.close()
        for line in lines:
            logger.info("scale.command: %s", line)
        return f"{problem}: {lines[-1][:MAX_LINE]}" if problem and lines else problem


class _Output:
    """The last part of a command's output, read as fast as PIPE_BYTES each READ_S: a command that
    prints without end takes neither memory nor the event loop."""

    def __init__(self, pipe: int) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a small one does, too
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._pipe, self._read)

    def _read(self) -> None:
        self._loop.remove_reader(self._pipe)
        if self._take():
            self._timer = self._loop.call_later(READ_S, self._listen)

    def _take(self) -> int:
        """Read the available output and return its size; 0 if there is none."""
        try:
            data = os.read(self._pipe, PIPE_BYTES)
        except OSError:
            return 0
        self._kept += data
        del self._kept[:-MAX_KEPT]
        return len(data)

    def close(self) -> list[str]:
        """Return the last lines, at most MAX_LINES, and stop reading; the pipe stays open."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._pipe)
        self._take()
        lines = self._kept.decode(errors="replace").splitlines()
        return [plain(line) for line in lines if line.strip()][-MAX_LINES:]
