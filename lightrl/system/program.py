"""A program of somebody else's, run to its end: its output in a file, and nothing of it left.

For programs that do not speak to the daemon; child.py has those that do.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from lightrl.system import open_files
from lightrl.system.child import REAPER, kill_session


class Program:
    """A process. On Linux all processes that it has started end with it, and with the daemon."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self._process = process

    @classmethod
    async def start(cls, words: Sequence[str], env: Mapping[str, str], log: Path) -> Self:
        """Start a command line with these variables; stdout and stderr are appended to `log`.
        Raises OSError."""
        is_reaped = sys.platform == "linux"
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        reaper = (sys.executable, "-I", "-S", REAPER, str(out))
        try:
            process = await asyncio.create_subprocess_exec(
                *(reaper if is_reaped else ()),
                *words,
                pass_fds=(out,),
                env=dict(env),
                stdin=asyncio.subprocess.PIPE if is_reaped else asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # ctrl-C is for the daemon
            )
        finally:
            os.close(out)
        open_files.restore_for(process.pid)
        return cls(process)

    async def wait(self) -> int:
        """Return the exit status; negative = number of the signal that killed it."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill it with all that it has started."""
        kill_session(self._process)
