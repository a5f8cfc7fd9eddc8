"""One daemon of a run as a child process: started, its end judged, signalled.

Owns how a process ended and what that means; whether it is started again is decided in local.py.
"""

import asyncio
import contextlib
import errno
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from lightrl.client.address import shown
from lightrl.errors import LightRLError
from lightrl.messages import Role

NOT_FINISHED = 3  # exit status of a coordinator whose run has ended in order, but stopped or failed
SAID_BYTES = 8192  # of the end of a log, in which the last line is looked for


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
        """Killed, or ended by an error that nobody foresaw: the next one may have better luck."""
        code = self.ended.result() if self.ended.done() else 0
        return code < 0 or (code not in {0, NOT_FINISHED} and not self.gave_a_reason)

    @property
    def gave_a_reason(self) -> bool:
        """Its last word was an error for the user: it would fail again in the same way."""
        return self.last_line().startswith("lightrl: ")

    def last_line(self) -> str:
        return last_line(self.log, self.said_before)

    def obituary(self) -> str:
        code = self.ended.result()
        if code < 0:  # its last line says nothing of that
            return (
                f"{self.name} was killed by {signal.Signals(-code).name} (log: {shown(self.log)})"
            )
        last = self.last_line().removeprefix("lightrl: ")
        why = f"ended with exit status {code}" + (f": {last}" if last else "")
        return f"{self.name} {why} (log: {shown(self.log)})"

    def signal(self, number: signal.Signals) -> None:
        """To all of its session, unless it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def last_line(log: Path, since: int = 0) -> str:
    """The last line after `since` bytes that says something."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - SAID_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:400] if lines else ""
