"""Daemons of a run as child processes: started, restarted when they crash, signalled, awaited.

local.py and slurm/sharing.py decide which daemons a run needs.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightrl.client.address import relative
from lightrl.errors import LightRLError
from lightrl.log import configure, inherited, last_line
from lightrl.log import environment as log_environment
from lightrl.messages.nodes import Role
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.system.threads import cancel

# Exit statuses: of a coordinator whose run was stopped or has failed; of any daemon whose last line
# logged is an error for the user. 1 is that of a crash.
NOT_FINISHED = 3
USER_ERROR = 4
# In a row, without progress.
RESTARTS = RestartPolicy(max_restarts=5, first_pause_s=0.2, growth=2.0, longest_pause_s=5.0)

logger = logging.getLogger(__name__)


class RunFailed(LightRLError):
    """A daemon that the run needs has ended. The text names it, the reason and its log; `reason` is
    the reason alone, if the daemon logged one."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Daemon:
    """One child process. `ended` gives its exit status."""

    name: str
    role: Role
    process: asyncio.subprocess.Process
    log: Path
    # bytes of an earlier process in the log
    log_offset: int
    ended: "asyncio.Task[int]"

    @classmethod
    async def start(cls, name: str, role: Role, run_dir: Path, *options: str) -> "Daemon":
        """Start `lightrl daemon` in a session of its own, which leaves when this process ends.

        Raises OSError, also if no thread can be started that waits for it.
        """
        log = run_dir / "logs" / f"{name}.log"
        module = (sys.executable, "-P", "-m", "lightrl.cli")  # -P: nothing of the user's directory
        command = ("daemon", "--name", name, "--role", role, "--run-dir", str(run_dir), "--tied")
        with log.open("ab") as out:
            before = out.tell()
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*module, *command, *options),
                    stdin=asyncio.subprocess.PIPE,  # closes when this process ends
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **log_environment(role, name)},
                    start_new_session=True,  # ctrl-C is for this process alone
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
        """Return whether the process was killed or failed unexpectedly: a restart may succeed."""
        return self.has_failed and self.ended.result() not in {NOT_FINISHED, USER_ERROR}

    @property
    def is_user_error(self) -> bool:
        return self.ended.done() and self.ended.result() == USER_ERROR

    def last_line(self) -> str:
        return last_line(self.log, self.log_offset)[:400]

    def exit_reason(self) -> str:
        code, last = self.ended.result(), self.last_line()
        if code < 0:
            why = f"was killed by {signal.Signals(-code).name}"
        elif self.is_user_error:
            why = f"failed: {last}"
        else:
            why = f"ended with exit status {code}" + (f": {last}" if last else "")
        return f"{self.name} {why} (log: {relative(self.log)})"

    def failure(self, more: str = "") -> RunFailed:
        return RunFailed(self.exit_reason() + more, self.last_line() if self.is_user_error else "")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its session, unless it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


class Daemons:
    """The daemons that one process has started, by name. `report` gets a line for each restart."""

    def __init__(
        self, run_dir: Path, report: Callable[[str], None], restarts: RestartPolicy = RESTARTS
    ) -> None:
        self.by_name: dict[str, Daemon] = {}
        self.over = asyncio.Event()  # set: no daemon is restarted
        self._run_dir = run_dir
        self._report = report
        self._restarts = restarts

    async def start(self, name: str, role: Role, *options: str) -> Daemon:
        """Start one, once the machine has the resources of a process. Raises OSError."""
        start = partial(Daemon.start, name, role, self._run_dir, *options)
        daemon = self.by_name[name] = await retry_on_resource_limit(start, name, self.report)
        logger.info("%s started, pid %d", name, daemon.process.pid)
        if self.over.is_set():
            daemon.signal(signal.SIGTERM)
        return daemon

    async def keep(
        self,
        daemon: Daemon,
        restart: Callable[[], Coroutine[Any, Any, Daemon]],
        may_restart: Callable[[Daemon], Coroutine[Any, Any, bool]],
        progressed: Callable[[], bool] = lambda: False,
    ) -> Daemon:
        """Restart a daemon whenever it ends and `may_restart`, until it crashes too often in a row,
        which `progressed` ends, or until `over`. Returns the last one."""
        crashes = CrashCounter(self._restarts)
        while True:
            began = time.monotonic()
            await self._unless_over(daemon.ended)
            if self.over.is_set() or not await may_restart(daemon):
                return daemon
            if progressed():
                crashes.progressed()
            if (pause_s := crashes.crashed(time.monotonic() - began)) is None:
                return daemon
            self.report(f"{daemon.exit_reason()}; starting it again")
            await self._unless_over(asyncio.create_task(asyncio.sleep(pause_s)))
            starting = asyncio.create_task(restart())
            await self._unless_over(starting)
            await cancel(starting)  # it has ended, or all of them end
            if starting.cancelled():
                return daemon
            daemon = starting.result()

    async def _unless_over(self, task: "asyncio.Task[Any]") -> None:
        """Return when the task is done, or when `over`."""
        over = asyncio.create_task(self.over.wait())
        try:
            await asyncio.wait({over, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()

    def report(self, line: str) -> None:
        self._report(line)
        logger.warning(line)

    def send(self, number: signal.Signals) -> None:
        for daemon in self.by_name.values():
            daemon.signal(number)

    async def wait(self, timeout_s: float) -> None:
        alive = [d.ended for d in self.by_name.values() if not d.ended.done()]
        if alive:
            await asyncio.wait(alive, timeout=timeout_s)

    async def end(self, *steps: tuple[signal.Signals, float]) -> None:
        """Send each signal to those that are left, and wait so many seconds for them."""
        self.over.set()
        for number, wait_s in steps:
            self.send(number)
            await self.wait(wait_s)


def run_child(work: Callable[[], int]) -> int:
    """Do the work of a child; return its exit status. The last line logged is an error's reason."""
    configure(inherited())
    try:
        return work()
    except LightRLError as e:
        logger.error(" ".join(str(e).split()))
        return USER_ERROR
