"""The checkpoints that a trainer's ranks write: when they are told to, how often it is tried, and
what is said of it.

Owns which checkpoint is the newest of this process's ranks, and which one is being written while
they go on. What lies in it is the ranks' business. Must not import torch: the daemon imports this
file.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import assert_never

from lightrl.config.schema import Config
from lightrl.messages.training import Checkpointed
from lightrl.trainer.checkpoint.saved import EXPORT, checkpoint_path, oldest_kept, step_of
from lightrl.trainer.protocol import Exported, Save, Saved, SaveEvent, SaveFailed, Staged
from lightrl.trainer.rank_processes import Ranks

logger = logging.getLogger(__name__)

LAST_SAVE_TRIES = 3
SAVE_PAUSE_S = 1.0


class Saves:
    """`begin_life` for each set of ranks, and `handle` for what they say; one caller at a time for
    all that waits."""

    def __init__(
        self, checkpoints: Path, config: Config, send: Callable[[Checkpointed], None]
    ) -> None:
        """`checkpoints` is their folder. What `send` is given is for the coordinator."""
        self._checkpoints = checkpoints
        self._settings = config.checkpoint
        self._grace_s = config.node.grace_s
        self._send = send
        self._is_stopping = False
        self._has_taken_long = self._has_waited = False  # and has said so
        self.num_awaited = 0  # that the ranks stand for
        self._changed = asyncio.Event()
        self.begin_life(0)

    def begin_life(self, step: int) -> None:
        """There are other ranks now, which have the weights of `step`."""
        self.step = step  # optimizer steps in the newest one, or in the one the ranks started from
        self._is_due = False
        self._is_last = False  # whoever had it begun tries again
        self._is_saving = False  # what is copied becomes durable
        self._is_exporting = False  # after that
        self._path = ""  # of the last one that was begun
        self._problem = ""  # why it is not there
        self._begun = 0.0  # seconds of the clock
        self._stood_s = 0.0  # how long the ranks waited for the copy

    def stop(self) -> None:
        """Training no longer waits for an export."""
        self._is_stopping = True
        self._changed.set()

    async def after_step(self, ranks: Ranks, step: int) -> None:
        """Has a checkpoint of the `step` steps done begun if one is due, once the one before is
        durable and exported."""
        interval = self._settings.interval
        self._is_due |= interval > 0 and step % interval == 0
        if not self._is_due:
            return
        with self._awaited():
            await self._until(lambda: not self._is_saving)
            await self._wait_for_export()
            if self._is_stopping:
                return
            self._is_due = False
            await self._begin(ranks, step, self._settings.export == "every")

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        self.num_awaited += 1
        try:
            yield
        finally:
            self.num_awaited -= 1

    async def _wait_for_export(self) -> None:
        """With `every`, no checkpoint begins before the one before is exported, unless the trainer
        is to stop."""
        if self._is_exporting and not (self._is_stopping or self._has_waited):
            self._has_waited = True
            logger.warning(
                "training waits until %s is exported: checkpoint.export = 'every' takes longer "
                "than the steps of checkpoint.interval = %d",
                self._path,
                self._settings.interval,
            )
        await self._until(lambda: not self._is_exporting or self._is_stopping)

    async def save_last(self, ranks: Ranks, step: int, is_end: bool) -> str:
        """A checkpoint of the `step` steps done, when nothing is lost by trying again. Why there is
        none, in one line; "" when it is durable. Only at the end of the run it has an export, which
        may still be under way then: who is preempted has no time for one."""
        await self._until(lambda: not self._is_saving)
        if self.step == step:
            return ""
        self._is_last = True
        has_export = is_end and self._settings.export != "never"
        problem = await self._save(ranks, step, has_export)
        for _ in range(LAST_SAVE_TRIES - 1):
            if not problem:
                break
            logger.warning("%s; trying again in %.0f s", problem, SAVE_PAUSE_S)
            await asyncio.sleep(SAVE_PAUSE_S)
            problem = await self._save(ranks, step, has_export)
        return problem

    async def exported(self) -> None:
        """When no export is under way. Ranks that died may have been at it: that is said."""
        await self._until(lambda: not self._is_exporting)
        last = checkpoint_path(self._checkpoints, self.step)
        is_due = self._settings.export != "never" and self.step > 0
        if is_due and self._path != str(last) and not (last / EXPORT).exists():
            logger.warning("%s has no export; lightrl export makes one", last)

    def handle(self, event: SaveEvent) -> None:
        """What rank 0 says of the checkpoint that is under way."""
        match event:
            case Saved(path):
                self._is_saving = False
                self.step = step_of(Path(path))
                self._tell_times(path)
                self.announce()
            case SaveFailed(path, reason):
                self._fail(path, reason)
            case Exported(path, error):
                if path == self._path:
                    self._is_exporting = False
                if error:
                    logger.warning("%s was not exported: %s; lightrl export does it", path, error)
            case _:
                assert_never(event)
        self._changed.set()

    def announce(self) -> None:
        """That there is this one, if there is any."""
        if self.step > 0:
            oldest = oldest_kept(self._checkpoints, self.step, self._settings.keep_last)
            self._send(Checkpointed(self.step, oldest))

    async def _save(self, ranks: Ranks, step: int, has_export: bool) -> str:
        await self._begin(ranks, step, has_export)
        await self._until(lambda: not self._is_saving)
        return self._problem

    async def _begin(self, ranks: Ranks, step: int, has_export: bool) -> None:
        """Until the ranks may go on."""
        self._path = path = str(checkpoint_path(self._checkpoints, step))
        self._problem, self._stood_s = "", 0.0
        # Before they are told: what rank 0 says of it may come before all have said Staged.
        self._is_saving, self._is_exporting = True, has_export
        self._begun = time.monotonic()
        ranks.tell(Save(step, path, has_export))
        first, *_ = await ranks.replies(Staged)
        if first.error:  # they all have one; that of rank 0 names the reason
            self._fail(path, first.error)
        self._stood_s = time.monotonic() - self._begun

    def _fail(self, path: str, reason: str) -> None:
        self._is_saving = self._is_exporting = False
        self._problem = f"{path} was not saved: {reason}"
        if not self._is_last:
            self._is_due = True
            logger.warning("%s; trying again after the next step", self._problem)

    def _tell_times(self, path: str) -> None:
        took_s = time.monotonic() - self._begun
        logger.info("saved %s in %.1f s; the ranks stood %.1f s", path, took_s, self._stood_s)
        if took_s > self._grace_s and not self._has_taken_long:
            self._has_taken_long = True
            logger.warning(
                "%s took %.0f s to be saved, more than node.grace_s = %g: a trainer that is "
                "preempted could not save in time",
                path,
                took_s,
                self._grace_s,
            )

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()
