"""A tracker as the daemon sees it: a process that receives every record, and may fail alone.

The run does not wait for it and does not fail with it, because metrics.jsonl has all figures.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.metrics.tracker import (
    COMMANDS,
    EVENTS,
    TARGET,
    FinishTracker,
    LogRecord,
    StartTracker,
    TrackerCommand,
    TrackerEvent,
    TrackerFailed,
    TrackerFinished,
    TrackerStarted,
)
from lightrl.system.child import Child, ChildDied, retry_on_resource_limit

logger = logging.getLogger(__name__)

GETS_NO_MORE = "it gets no figures from now on, metrics.jsonl still does"
LAST_S = 60.0  # to send the rest at the end of a run
MAX_WAITING = 100_000  # records, until it has started


class RemoteTracker:
    """Needs a running event loop from its construction on; `await close()` at the end."""

    def __init__(
        self, backend: str, run_dir: Path, config: Config, report: Callable[[str], None]
    ) -> None:
        settings = config.logging
        self._start = StartTracker(
            backend,
            str(run_dir.resolve()),
            config.run.name,
            settings.project,
            settings.group,
            settings.tags,
            config.model_dump_json(),
        )
        self._log = run_dir / "logs" / f"{backend}.log"
        self._report = report
        self._child: Child[TrackerCommand, TrackerEvent] | None = None
        self._waiting: deque[LogRecord] = deque(maxlen=MAX_WAITING)
        self._is_over = False  # nothing more is sent
        self._begun = asyncio.Event()  # the process has started, or failed to
        self._task = asyncio.get_running_loop().create_task(self._run(), name=backend)

    def write(self, step: int, record: dict[str, float]) -> None:
        if self._is_over:
            return
        if self._child is not None:
            self._child.send(LogRecord(step, record))
        else:
            self._waiting.append(LogRecord(step, record))

    async def close(self) -> None:
        """Wait at most `LAST_S` until the rest is sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._begun.wait()
        if self._child is not None:
            self._child.send(FinishTracker())
            _, late = await asyncio.wait({self._task}, timeout=LAST_S)
            if late:
                self._report(
                    f"WARNING: {self._start.backend}: not all figures were sent within "
                    f"{LAST_S:g} s; metrics.jsonl has them"
                )
            self._is_over = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._child is not None:
            await self._child.stop(0.0)

    async def _run(self) -> None:
        name = self._start.backend
        start = partial(Child.start, TARGET, f"{name} tracker", COMMANDS, EVENTS, log=self._log)
        try:
            self._log.parent.mkdir(exist_ok=True)
            child = await retry_on_resource_limit(start, f"the {name} tracker", self._report)
        except OSError as e:
            self._give_up(e.strerror or str(e))
            return None
        finally:
            self._begun.set()
        child.send(self._start)
        self._child = child
        while self._waiting:
            child.send(self._waiting.popleft())
        try:
            while True:
                match await child.receive():
                    case TrackerStarted(place):
                        logger.info("%s: figures go to %s", name, place)
                    case TrackerFailed(reason):
                        return self._give_up(reason)
                    case TrackerFinished():
                        return None
        except ChildDied as e:
            self._give_up(str(e))

    def _give_up(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._waiting.clear()
            self._report(
                f"WARNING: {self._start.backend}: {reason}; {GETS_NO_MORE} "
                f"(see logs/{self._log.name})"
            )
