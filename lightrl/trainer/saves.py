"""Decide when the ranks of a trainer write checkpoints, and try failed ones again; track the newest
one.

Must not import torch: the daemon imports this file.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.messages.training import Checkpointed
from lightrl.trainer.checkpoint.saved import EXPORT, checkpoint_path, oldest_kept, step_of
from lightrl.trainer.protocol import Done, Save, Saved
from lightrl.trainer.rank_processes import Ranks

logger = logging.getLogger(__name__)

LAST_SAVE_TRIES = 3
SAVE_PAUSE_S = 1.0


class Saves:
    """Decides when checkpoints are written. `begin_life` for each set of ranks, `handle` for their
    reports; one caller at a time for the coroutines."""

    def __init__(
        self, checkpoints: Path, config: Config, send: Callable[[Checkpointed], None]
    ) -> None:
        """`send` reaches the coordinator."""
        self._checkpoints = checkpoints
        self._settings = config.checkpoint
        self._grace_s = config.node.grace_s
        self._send = send
        self._is_stopping = False
        self.num_awaited = 0  # saves for which training waits
        self._changed = asyncio.Event()
        self.begin_life(0)

    def begin_life(self, step: int) -> None:
        """New ranks have started from the weights of `step`."""
        self.step = step  # optimizer steps in the newest checkpoint, or in that of the start
        self._is_due = False
        self._is_saving = False  # a copy becomes durable
        self._is_exporting = False  # after that
        self._path = ""  # of the last one that was begun
        self._problem = ""  # why it does not exist
        self._began = self._blocked_s = 0.0  # of the last one; how long the ranks copied

    def stop(self) -> None:
        """Training no longer waits for an export."""
        self._is_stopping = True
        self._changed.set()

    async def after_step(self, ranks: Ranks, step: int) -> None:
        """Begin a checkpoint of `step` steps if one is due, once the one before is durable and,
        with `every`, exported; else the ranks would fall behind."""
        interval = self._settings.interval
        self._is_due |= interval > 0 and step % interval == 0
        if not self._is_due:
            return
        self.num_awaited += 1
        try:
            await self._until(lambda: not self._is_saving)
            if self._is_exporting and not self._is_stopping:
                logger.warning(
                    "training waits until %s is exported: checkpoint.export = 'every' takes longer "
                    "than the steps of checkpoint.interval = %d",
                    self._path,
                    interval,
                )
            await self._until(lambda: not self._is_exporting or self._is_stopping)
            if not self._is_stopping:
                await self._begin(ranks, step, self._settings.export == "every")
        finally:
            self.num_awaited -= 1

    async def save_last(self, ranks: Ranks, step: int, is_end: bool) -> str:
        """Save `step` steps and wait until that is durable, trying several times. Return why there
        is no checkpoint, in one line, or "". It has an export at the end of the run alone, which
        may still run then: a preempted node has no time for one."""
        await self._until(lambda: not self._is_saving)
        for pause_s in (0.0, *[SAVE_PAUSE_S] * (LAST_SAVE_TRIES - 1)):
            if self.step == step:
                return ""
            await asyncio.sleep(pause_s)
            await self._begin(ranks, step, is_end and self._settings.export != "never")
            await self._until(lambda: not self._is_saving)
        return "" if self.step == step else self._problem

    async def exported(self) -> None:
        """Wait for a running export. Warn if ranks died before they had written it."""
        await self._until(lambda: not self._is_exporting)
        last = checkpoint_path(self._checkpoints, self.step)
        is_due = self._settings.export != "never" and self.step > 0
        if is_due and self._path != str(last) and not (last / EXPORT).exists():
            logger.warning("%s has no export; lightrl export makes one", last)

    def handle(self, event: Saved) -> None:
        """Handle a report of rank 0."""
        path, error = event.path, event.error
        if event.is_export:
            if path == self._path:
                self._is_exporting = False
            if error:
                logger.warning("%s was not exported: %s; lightrl export does it", path, error)
        elif error:
            self._is_saving = self._is_exporting = False
            self._is_due = True
            self._problem = f"{path} was not saved: {error}"
            logger.warning("%s; trying again", self._problem)
        else:
            self._is_saving = False
            self.step = step_of(Path(path))
            self._log_times(path)
            self.announce()
        self._changed.set()

    def announce(self) -> None:
        """Report the newest checkpoint, if there is one."""
        if self.step > 0:
            oldest = oldest_kept(self._checkpoints, self.step, self._settings.keep_last)
            self._send(Checkpointed(self.step, oldest))

    async def _begin(self, ranks: Ranks, step: int, has_export: bool) -> None:
        """Return when the ranks may continue."""
        self._is_due = False
        self._path = path = str(checkpoint_path(self._checkpoints, step))
        # Before the command: the report of rank 0 may come before all have answered.
        self._is_saving, self._is_exporting = True, has_export
        self._began = time.monotonic()
        ranks.send_all(Save(step, path, has_export))
        await ranks.replies(Done)
        self._blocked_s = time.monotonic() - self._began

    def _log_times(self, path: str) -> None:
        took_s = time.monotonic() - self._began
        logger.info("saved %s in %.1f s; the ranks waited %.1f s", path, took_s, self._blocked_s)
        if took_s > self._grace_s:
            limit = f"node.grace_s = {self._grace_s:g}"
            what = f"{path} took {took_s:.0f} s to be saved, more than {limit}"
            logger.warning("%s: a trainer that is preempted could not save in time", what)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()
