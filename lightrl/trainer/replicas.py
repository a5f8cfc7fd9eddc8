"""What the replicas are at (`train.replicas`: copies of the model): each computes its own groups,
and answers for itself.

Owns who is free, and who has to answer. Which groups a replica gets is said by `portions`. Must not
import torch: the daemon imports this file.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from lightrl.trainer.protocol import AT_ONCE, Accumulate, Accumulated, MicroBatch
from lightrl.trainer.rank_processes import Ranks

MOST_BEFORE = 128  # micro-batches that lie before a replica, in whole answers
IN_FLIGHT = 2  # micro-batches, where ranks may have to park before the next one


class Replicas:
    """Of one step. Always `close` it."""

    def __init__(
        self,
        ranks: Ranks,
        num: int,
        changed: Callable[[], None],
        halts: Callable[[], bool] | None = None,
        may_work: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`changed` is called when a replica computes nothing any more. `halts`: whether ranks have
        to park before they compute more, asked before each micro-batch; None: they never have to.
        `may_work`: whether the ranks of a replica have their devices.
        """
        self._ranks = ranks
        self._changed = changed
        self._halts = halts
        self._may_work = may_work
        self._size = AT_ONCE if halts is None else 1  # micro-batches of an answer
        self.num_ranks = len(ranks) // num  # of each
        self._owed = [0] * num  # answers of each of its ranks
        # what its ranks have not been told yet, of each rank
        self._untold: list[deque[list[Accumulate]]] = [deque() for _ in range(num)]
        self._hearing: dict[int, asyncio.Task[None]] = {}
        self.busy_s = 0.0  # any of them
        self._busy_since = 0.0

    def __len__(self) -> int:
        return len(self._owed)

    @property
    def free(self) -> list[int]:
        """Those that may work, and have nothing to compute. Raises what went wrong with another."""
        self._check()
        idle = (k for k, owed in enumerate(self._owed) if not (owed or self._untold[k]))
        return [k for k in idle if self._may_work(k)]

    @property
    def are_idle(self) -> bool:
        """Nothing is computed. There may be more once they may go on. Raises what went wrong."""
        self._check()
        return not any(self._owed)

    @property
    def have_more(self) -> bool:
        """They have to compute what they were not told yet, because they had to park."""
        each = enumerate(zip(self._owed, self._untold, strict=True))
        return any(untold and not owed and self._may_work(k) for k, (owed, untold) in each)

    @property
    def have_room(self) -> bool:
        """One is free, and none has so much before it that others would only be piled up."""
        before = (o + len(untold) for o, untold in zip(self._owed, self._untold, strict=True))
        return bool(self.free) and max(before) * self._size < MOST_BEFORE

    def accumulate(
        self,
        replica: int,
        step: int,
        batches_R: Sequence[tuple[MicroBatch, ...]],
        is_last: bool = False,
    ) -> None:
        """Has each rank of the replica compute its micro-batches, after what it has to compute; all
        of them have as many. `is_last`: an update follows."""
        num = len(batches_R[0])
        for start in range(0, num, self._size):
            end = start + self._size
            ends = is_last and end >= num
            told = [Accumulate(step, batches[start:end], ends) for batches in batches_R]
            self._untold[replica].append(told)
        self._tell(replica)

    def go_on(self) -> None:
        """They may have been halted."""
        for replica, untold in enumerate(self._untold):
            if untold:
                self._tell(replica)

    def drop(self) -> None:
        """What they were not told is not computed any more."""
        for untold in self._untold:
            untold.clear()

    async def settle(self) -> None:
        """Until none computes: whatever else ranks are told, all of them are told."""
        await asyncio.gather(*self._hearing.values())

    async def close(self) -> None:
        for task in self._hearing.values():
            task.cancel()
        await asyncio.gather(*self._hearing.values(), return_exceptions=True)

    def _check(self) -> None:
        for task in self._hearing.values():
            if task.done():
                task.result()

    def _tell(self, replica: int) -> None:
        """As much as may be told now, and hears the answers."""
        untold, was_idle = self._untold[replica], not self._owed[replica]
        while untold and self._may_tell(replica):
            for rank, command in zip(self._members(replica), untold.popleft(), strict=True):
                self._ranks.send(rank, command)
            if not any(self._owed):
                self._busy_since = asyncio.get_running_loop().time()
            self._owed[replica] += 1
        if was_idle and self._owed[replica]:
            hearing = asyncio.ensure_future(self._hear(replica))
            hearing.add_done_callback(lambda _: self._changed())
            self._hearing[replica] = hearing

    def _may_tell(self, replica: int) -> bool:
        if self._halts is None:
            return True
        is_full = self._owed[replica] >= IN_FLIGHT
        return not (is_full or self._halts()) and self._may_work(replica)

    async def _hear(self, replica: int) -> None:
        while self._owed[replica]:
            await self._ranks.replies(Accumulated, ranks=self._members(replica))
            self._owed[replica] -= 1
            if not any(self._owed):
                self.busy_s += asyncio.get_running_loop().time() - self._busy_since
            if self._owed[replica]:  # else it ends here, and another hears what is told
                self._tell(replica)

    def _members(self, replica: int) -> range:
        """As FSDP's mesh has them: those of a replica one after the other."""
        return range(replica * self.num_ranks, (replica + 1) * self.num_ranks)
