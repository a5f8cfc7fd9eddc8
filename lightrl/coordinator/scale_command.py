"""Runs `scale.command` with the number of preemptible nodes that the run wants.

Owns when it runs, and that nothing it does harms the run: it may be missing, hang, fail, print
without end, or start other nodes than it should, and costs one line of the log. How many nodes are
wanted is decided in core/scaling.py.
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
MAX_LINE = 300  # characters of what it says, in a warning
MAX_KEPT = 8 << 10  # bytes of its output that go into the log, of each time: the last,
MAX_LINES = 50  # in so many lines
PIPE_BYTES = 1 << 20
READ_S = 0.01  # between two reads: what prints without end takes no more of the loop than this


class ScaleCommand:
    """Of numbers that follow each other quickly the last one counts."""

    def __init__(
        self, settings: ScaleSection, num_there: Callable[[], int], warn: Callable[[str], None]
    ) -> None:
        """`num_there`: preemptible nodes that take part; `warn` gets one line for each time that
        the command did not do what it should."""
        self._settings = settings
        self._num_there = num_there
        self._warn = warn
        self._wanted = 0
        self._is_new = asyncio.Event()

    def want(self, wanted: int) -> None:
        self._wanted = wanted
        self._is_new.set()

    async def run(self) -> None:
        """Until cancelled; what runs then is killed. What failed is tried again after
        `scale.every_s`, and said again if the reason is another one."""
        every_s, said = self._settings.every_s, None
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            if not self._settings.command:
                continue
            wanted, began = self._wanted, time.monotonic()
            if (problem := await self._call(wanted)) is not None:
                self._is_new.set()
                if (wanted, problem) != said:
                    self._warn(f"scale.command for {wanted} nodes {problem}")
            said = wanted, problem
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
            there = self._num_there()
            if problem is None and there != wanted and not self._is_new.is_set():
                self._warn(
                    f"scale.command for {wanted} nodes: {there} preemptible nodes are here "
                    f"{every_s:g} s later (a node counts if it joined with --preemptible)"
                )

    async def _call(self, wanted: int) -> str | None:
        """Why it did not work, in one line."""
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
        """Until it has ended. What it leaves behind in order goes on: it may be nodes."""
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
        said = output.close()
        for line in said:
            logger.info("scale.command: %s", line)
        return f"{problem}: {said[-1][:MAX_LINE]}" if problem and said else problem


class _Output:
    """The last of what a command prints. It is read as fast as PIPE_BYTES each READ_S: one that
    prints for ever takes neither memory nor the event loop."""

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
        """What is there now; 0: nothing, and nothing will be."""
        try:
            data = os.read(self._pipe, PIPE_BYTES)
        except OSError:
            return 0
        self._kept += data
        del self._kept[:-MAX_KEPT]
        return len(data)

    def close(self) -> list[str]:
        """The last lines, at most MAX_LINES. Nothing is read any more; the pipe stays open."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._pipe)
        self._take()
        lines = self._kept.decode(errors="replace").splitlines()
        return [plain(line) for line in lines if line.strip()][-MAX_LINES:]
