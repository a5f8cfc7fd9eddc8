"""Send the shards of a step that is trained again from the journal to the trainer.

Limits the shards in flight. core/training/trainer_feed.py decides which step is trained again.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from lightrl.coordinator.journaling import Journaling
from lightrl.core.commands import ReplayShards
from lightrl.core.training.trainer_feed import UntakenShards
from lightrl.errors import JournalError
from lightrl.messages.training import ShardsTaken, TrainShard


class Replays:
    """Sends the shards of one step from the journal, at the pace of the trainer."""

    def __init__(
        self,
        journaling: Journaling,
        send: Callable[[str, TrainShard, int], bool],
        fail: Callable[[str], None],
    ) -> None:
        """`send(node, shard, hello)` returns False if the trainer has sent another Hello since.
        `fail` is called with the reason if a step cannot be trained again.
        """
        self._journaling = journaling
        self._send = send
        self._fail = fail
        self._step = -1
        self._window = UntakenShards()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup, wanted: ReplayShards) -> None:
        """Send this step instead of any other."""
        self.cancel()
        self._step = wanted.step
        self._window = UntakenShards()
        self._task = tasks.create_task(self._replay(wanted), name="replay")

    def on_shards_taken(self, taken: ShardsTaken) -> None:
        if taken.step == self._step:
            self._window.acknowledge(taken.index)
            self._changed.set()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _replay(self, wanted: ReplayShards) -> None:
        try:
            async with aclosing(self._journaling.shards(wanted.step)) as shards:
                async for shard in shards:
                    await self._room_for(shard)
                    if not self._send(wanted.node, shard, wanted.hello):
                        return
        except JournalError as e:
            self._fail(str(e))

    async def _room_for(self, shard: TrainShard) -> None:
        num_tokens = sum(len(r.token_ids) // 4 for group in shard.groups for r in group.responses)
        while not self._window.has_room(num_tokens):
            self._changed.clear()
            await self._changed.wait()
        self._window.add(shard.index, num_tokens)
