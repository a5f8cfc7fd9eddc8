"""One daemon of a run as a child process: started, its end judged, signalled.

Owns how a process ended and what that means; whether it is started again is decided in local.py.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.client.address import relative
from lightrl.errors import LightRLError
from lightrl.log import configure, inherited, last_line
from lightrl.log import environment as log_environment
from lightrl.messages.nodes import Role

# Exit statuses: of a coordinator whose run has ended in order, but stopped or failed; of any daemon
# that ended by an error whose reason is the last line of its log. 1 is that of a crash.
NOT_FINISHED = 3
GAVE_A_REASON = 4

logger = logging.getLogger(__name__)


class RunFailed(LightRLError):
    """A daemon that the run needs has ended; the text says which, why, and where its log is."""


@dataclass(frozen=True)
class Daemon:
    """One child process. `ended` gives its exit status."""

    name: str
    role: Role
    process: asyncio.subprocess.Process
    log: Path
    # bytes that were in its log already: words of the one that it replaces
    said_before: int
    ended: "asyncio.Task[int]"

    @classmethod
    async def start(cls, name: str, role: Role, run_dir: Path, *options: str) -> "Daemon":
        """`lightrl daemon` in a session of its own, which leaves when this process ends.

        Raises OSError, also for want of a thread to wait for it: it then leaves at once.
        """
        log = run_dir / "logs" / f"{name}.log"
        command = (
            "daemon",
            "--name",
            name,
            "--role",
            role,
            "--run-dir",
            str(run_dir),
            "--tied",
            *options,
        )
        with log.open("ab") as out:
            before = out.tell()
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # a queue.py, or another lightrl/, where the user stands is not ours
                    "-m",
                    "lightrl.cli",
                    *command,
                    stdin=asyncio.subprocess.PIPE,  # closes when this process ends, however it does
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **log_environment(role, name)},
                    # ctrl-C is for this process, which then asks them to drain
                    start_new_session=True,
                )
            except RuntimeError as e:
                raise OSError(errno.EAGAIN, str(e)) from e
        ended = asyncio.create_task(process.wait(), name=f"{name} ends")
        return cls(name, role, process, log, before, ended)

    @property
    def has_failed(self) -> bool:
        return self.ended.done() and self.ended.result() != 0

    @property
    def has_crashed(self) -> bool:
        """Killed, or ended by an unexpected error: the next one may have better luck."""
        code = self.ended.result() if self.ended.done() else 0
        return code not in {0, NOT_FINISHED, GAVE_A_REASON}

    @property
    def gave_a_reason(self) -> bool:
        """Its last word was an error for the user: it would fail again in the same way."""
        return self.ended.done() and self.ended.result() == GAVE_A_REASON

    def last_line(self) -> str:
        return last_line(self.log, self.said_before)[:400]

    def obituary(self) -> str:
        code = self.ended.result()
        if code < 0:  # its last line says nothing of that
            why = f"was killed by {signal.Signals(-code).name}"
        elif self.gave_a_reason:
            why = f"failed: {self.last_line()}"
        else:
            last = self.last_line()
            why = f"ended with exit status {code}" + (f": {last}" if last else "")
        return f"{self.name} {why} (log: {relative(self.log)})"

    def signal(self, number: signal.Signals) -> None:
        """To all of its session, unless it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def run_child(work: Callable[[], int]) -> int:
    """In the child: does its `work`; the exit status. An error's reason is the last line logged."""
    configure(inherited())
    try:
        return work()
    except LightRLError as e:
        logger.error(" ".join(str(e).split()))
        return GAVE_A_REASON
