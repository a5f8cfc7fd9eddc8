"""What the replicas are at (`train.replicas`: copies of the model): each computes its own groups,
and answers for itself.

Owns who is free, and who has to answer. Which groups a replica gets is said by `portions`. Must not
import torch: the daemon imports this file.
"""

import asyncio
from collections.abc import Callable, Sequence

from lightrl.trainer.protocol import Accumulated, MicroBatch
from lightrl.trainer.rank_processes import Ranks

MOST_OWED = 16  # answers, of up to AT_ONCE micro-batches each: what lies before the ranks of one


class Replicas:
    """Of one step. Always `close` it."""

    def __init__(self, ranks: Ranks, num: int, changed: Callable[[], None]) -> None:
        """`changed` is called when a replica has become free."""
        self._ranks = ranks
        self._changed = changed
        self.num_ranks = len(ranks) // num  # of each
        self._owed = [0] * num  # answers of each of its ranks
        self._hearing: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._owed)

    @property
    def free(self) -> list[int]:
        """Those that have nothing to compute. Raises what went wrong with another."""
        for task in self._hearing.values():
            if task.done():
                task.result()
        return [replica for replica, owed in enumerate(self._owed) if not owed]

    @property
    def are_idle(self) -> bool:
        return len(self.free) == len(self)

    @property
    def have_room(self) -> bool:
        """One is free, and none has so much before it that others would only be piled up."""
        return bool(self.free) and max(self._owed) < MOST_OWED

    def accumulate(
        self, replica: int, step: int, batches_R: Sequence[tuple[MicroBatch, ...]]
    ) -> None:
        """Has each rank of the replica compute its micro-batches, after what it has to compute."""
        members = self._members(replica)
        owed = self._ranks.accumulate(step, dict(zip(members, batches_R, strict=True)))
        if owed and not self._owed[replica]:
            hearing = asyncio.ensure_future(self._hear(replica))
            hearing.add_done_callback(lambda _: self._changed())
            self._hearing[replica] = hearing
        self._owed[replica] += owed

    async def settle(self) -> None:
        """Until all are free: whatever else ranks are told, all of them are told."""
        await asyncio.gather(*self._hearing.values())

    async def close(self) -> None:
        for task in self._hearing.values():
            task.cancel()
        await asyncio.gather(*self._hearing.values(), return_exceptions=True)

    async def _hear(self, replica: int) -> None:
        while self._owed[replica]:
            await self._ranks.replies(Accumulated, ranks=self._members(replica))
            self._owed[replica] -= 1

    def _members(self, replica: int) -> range:
        """As FSDP's mesh has them: those of a replica one after the other."""
        return range(replica * self.num_ranks, (replica + 1) * self.num_ranks)
