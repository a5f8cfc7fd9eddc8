"""Runs `scale.command` with the number of preemptible nodes that the run wants.

Owns when it runs. The command may be missing, hang, fail, print without end, or start other nodes
than it should: that costs one line of the log. How many nodes are wanted is decided in
core/nodes/scaling.py.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from lightrl.config.scale import ScaleSection
from lightrl.rewards.protocol import NEVER
from lightrl.system import open_files
from lightrl.system.child import is_for_lack
from lightrl.system.output import plain

logger = logging.getLogger(__name__)

WANTED = "LIGHTRL_WANTED"
MAX_LINE = 300  # characters of its output, in a warning
MAX_KEPT = 8 << 10  # bytes, the last of its output, that go into the log,
MAX_LINES = 50  # in so many lines
READ_S = 0.01  # between two reads: a command that prints without end takes little of the loop
CHUNK_BYTES = 1 << 16
LAST_OUTPUT_S = 0.2  # after its end


class ScaleCommand:
    """Run the scale command; of numbers in quick succession only the last one is used."""

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
        """Why it did not work, in one line."""
        words = [*self._settings.words, str(wanted)]
        logger.info("runs %s", words)
        kept: bytearray = bytearray()
        try:
            ours, theirs = os.pipe()
            tail = asyncio.create_task(_keep_tail(ours, kept))
            try:
                process = await self._start(words, wanted, theirs)
            finally:
                os.close(theirs)
            problem = await self._watch(process)
            # what it leaves running may still hold the pipe
            await asyncio.wait({tail}, timeout=LAST_OUTPUT_S)
            tail.cancel()
        except (OSError, RuntimeError, ValueError) as e:
            if isinstance(e, RuntimeError) and not is_for_lack(e):
                raise
            return f"cannot be started: {getattr(e, 'strerror', None) or e}"
        lines = kept.decode(errors="replace").splitlines()
        last = [plain(line) for line in lines if line.strip()][-MAX_LINES:]
        for line in last:
            logger.info("scale.command: %s", line)
        return f"{problem}: {last[-1][:MAX_LINE]}" if problem and last else problem

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

    async def _watch(self, process: Process) -> str | None:
        """Wait for its end. What it leaves running in order continues: it may be nodes."""
        limit_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                code = await process.wait()
        except TimeoutError:
            return f"was killed: it had not ended after scale.timeout_s = {limit_s:g}"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return f"failed ({how})" if code else None


async def _keep_tail(pipe: int, kept: bytearray) -> None:
    """Read a pipe to its end; keep the last bytes. Closes it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    file = os.fdopen(pipe, "rb")
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    try:
        while data := await reader.read(CHUNK_BYTES):
            kept += data
            del kept[:-MAX_KEPT]
            await asyncio.sleep(READ_S)
    finally:
        transport.close()
