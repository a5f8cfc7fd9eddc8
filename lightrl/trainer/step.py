"""One step of the trainer as its groups come in: which of them the ranks accumulate at once.

Owns the shards that were taken and the commands that make gradients of them. How groups are packed
is `trainer.batch`'s business, what they are worth `trainer.advantage`'s; the supervisor says when
the step advances, begins anew and ends.
"""

from collections import deque
from collections.abc import Callable

from lightrl.config import Config
from lightrl.messages import Message, ShardsTaken, TrainGroup, TrainShard
from lightrl.trainer.algorithm.advantage import train_samples
from lightrl.trainer.batch import fills, streamed, useful
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.protocol import (
    Cleared,
    ClearStep,
    MicroBatch,
    ParkRank,
    RankParked,
    TrainSample,
    Updated,
    UpdateWeights,
)
from lightrl.trainer.rank_processes import Ranks
from lightrl.trainer.shard_queue import ShardQueue


class Step:
    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        step: int,
        waiting: deque[TrainShard],
        is_packed: bool,
        send: Callable[[Message], None],
        devices: NodeDevices,
    ) -> None:
        """`waiting`: where shards come in; those of this step are taken from its front. `devices`:
        which others may ask for."""
        self._config = config
        self._ranks = ranks
        self._waiting = waiting
        self._is_packed = is_packed
        self._send = send
        self._devices = devices
        self.queue = self._new_queue(step)
        # What of that which is held is yet to be computed, for each rank
        self._cut_R: list[tuple[MicroBatch, ...]] | None = None

    @property
    def can_go_on(self) -> bool:
        """Something has come, or all has, and the ranks may have their devices for it; or they are
        to give them back."""
        has_work = bool(self._waiting) or self.queue.can_go_on or self._cut_R is not None
        return self._must_park or (has_work and self._devices.is_given)

    @property
    def has_all(self) -> bool:
        """Its last shard has come, so that it ends without any other word."""
        step = self.queue.step
        return self.queue.is_complete or any(s.last for s in self._waiting if s.step == step)

    @property
    def _must_park(self) -> bool:
        """Before it goes on. A step of which all has come ends first, and parks then."""
        return self._devices.is_asked and not self.has_all

    @property
    def is_accumulated(self) -> bool:
        return self.queue.is_accumulated

    @property
    def is_begun_anew(self) -> bool:
        """By the coordinator, on its own."""
        return self.queue.is_begun_anew_by(self._waiting)

    async def begin_anew(self) -> None:
        """The ranks forget what they have of it; weights that it has moved are what they were."""
        step = self.queue.step
        if self.queue.portions or self._cut_R is not None:
            self._ranks.tell(ClearStep(step))
            await self._ranks.replies(Cleared)
        self.queue, self._cut_R = self._new_queue(step), None

    async def advance(self) -> None:
        """Takes what waits, accumulates it as soon as that is due, and has the ranks update with a
        mini-batch that is complete, unless it is the last: that is what ends the step. Where the
        ranks must park in the middle of that it is continued by the next call."""
        queue = self.queue
        if self._must_park:
            self._ranks.tell(ParkRank(queue.step))
            await self._ranks.replies(RankParked)
            return
        if self._cut_R is None:
            queue.held += [train_samples(group, self._config) for group in self._next_groups()]
            if queue.held and self._is_due():
                self._cut_R = self._micro_batches(queue.held)
        if self._cut_R is not None:
            self._cut_R = await self._accumulate(self._cut_R)
            if self._cut_R is not None:
                return
            queue.count(queue.held)
        if queue.has_mini_batch:
            self._ranks.tell(UpdateWeights(queue.step, queue.num_responses, queue.num_tokens))
            await self._ranks.replies(Updated)
            queue.next_mini_batch()

    def _new_queue(self, step: int) -> ShardQueue:
        train = self._config.train
        return ShardQueue(step, train.prompts_per_step, train.mini_batches)

    def _next_groups(self) -> list[TrainGroup]:
        """What waits; while it is trained, the coordinator may send as much again."""
        index = self.queue.index
        groups = self.queue.pop_groups(self._waiting)
        if self.queue.index > index:
            self._send(ShardsTaken(self.queue.step, self.queue.index - 1))
        return groups

    def _is_due(self) -> bool:
        """A deterministic step has the same micro-batches however few wait."""
        if self._config.run.deterministic or self.queue.must_not_wait(self._waiting):
            return True
        most = self._config.train.max_tokens_per_gpu
        return fills(useful(self.queue.held, self._config), len(self._ranks), most)

    def _micro_batches(self, groups: list[list[TrainSample]]) -> list[tuple[MicroBatch, ...]]:
        config, num = self._config, len(self._ranks)
        most, in_order = config.train.max_tokens_per_gpu, config.run.deterministic
        return streamed(useful(groups, config), num, most, in_order, self._is_packed)

    async def _accumulate(
        self, batches_R: list[tuple[MicroBatch, ...]]
    ) -> list[tuple[MicroBatch, ...]] | None:
        """What is left of them, if the ranks must park before; else None."""
        halts = (lambda: self._must_park) if self._devices.are_shared else None
        queue = self.queue
        done = await self._ranks.accumulate(queue.step, batches_R, queue.ends_mini_batch, halts)
        is_all = done == len(batches_R[0])
        return None if is_all else [batches[done:] for batches in batches_R]
