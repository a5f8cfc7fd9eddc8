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
from lightrl.trainer.protocol import Cleared, ClearStep, TrainSample, Updated, UpdateWeights
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
    ) -> None:
        """`waiting`: where shards come in; those of this step are taken from its front."""
        self._config = config
        self._ranks = ranks
        self._waiting = waiting
        self._is_packed = is_packed
        self._send = send
        self.queue = self._new_queue(step)

    @property
    def can_go_on(self) -> bool:
        """Something has come, or all has."""
        return bool(self._waiting) or self.queue.can_go_on

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
        if self.queue.portions:
            self._ranks.tell(ClearStep(step))
            await self._ranks.replies(Cleared)
        self.queue = self._new_queue(step)

    async def advance(self) -> None:
        """Takes what waits, accumulates it as soon as that is due, and has the ranks update with a
        mini-batch that is complete, unless it is the last: that is what ends the step."""
        queue = self.queue
        queue.held += [train_samples(group, self._config) for group in self._next_groups()]
        if queue.held and self._is_due():
            await self._accumulate(queue.held)
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

    async def _accumulate(self, groups: list[list[TrainSample]]) -> None:
        config, num = self._config, len(self._ranks)
        most, in_order = config.train.max_tokens_per_gpu, config.run.deterministic
        batches_R = streamed(useful(groups, config), num, most, in_order, self._is_packed)
        await self._ranks.accumulate(self.queue.step, batches_R)
