"""The checkpoints that a trainer's ranks write: that they are told to, how often it is tried, and
what is said of it.

Owns which checkpoint is the newest of this process's ranks. When one is due is the supervisor's
business, what lies in it the ranks'. Must not import torch: the daemon imports this file.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from lightrl.messages import Checkpointed
from lightrl.trainer.protocol import Save, Saved, SaveFailed
from lightrl.trainer.rank_processes import Ranks
from lightrl.trainer.saved import checkpoint_path, oldest_kept

logger = logging.getLogger(__name__)

LAST_SAVE_TRIES = 3
SAVE_PAUSE_S = 1.0


class Saves:
    def __init__(
        self, checkpoints: Path, keep_last: int, send: Callable[[Checkpointed], None]
    ) -> None:
        """`checkpoints` is their folder. What `send` is given is for the coordinator."""
        self._checkpoints = checkpoints
        self._keep_last = keep_last
        self._send = send
        self.step = 0  # optimizer steps in the newest one, or in the one the ranks started from

    async def save(self, ranks: Ranks, step: int) -> str:
        """A checkpoint of the `step` steps done. Returns why there is none, in one line; "" when it
        is durable."""
        path = checkpoint_path(self._checkpoints, step)
        ranks.tell(Save(step, str(path), export=True))
        for reply in await ranks.replies(Saved, SaveFailed):
            if isinstance(reply, SaveFailed):  # that of rank 0 names the reason
                return f"{path} was not saved: {reply.reason}"
        logger.info("saved %s", path)
        self.step = step
        self.announce()
        return ""

    async def save_last(self, ranks: Ranks, step: int) -> str:
        """As `save`, when nothing is lost by trying again."""
        problem = await self.save(ranks, step)
        for _ in range(LAST_SAVE_TRIES - 1):
            if not problem:
                break
            logger.warning("%s; trying again in %.0f s", problem, SAVE_PAUSE_S)
            await asyncio.sleep(SAVE_PAUSE_S)
            problem = await self.save(ranks, step)
        return problem

    def announce(self) -> None:
        """That there is this one, if there is any."""
        if self.step > 0:
            oldest = oldest_kept(self._checkpoints, self.step, self._keep_last)
            self._send(Checkpointed(self.step, oldest))
