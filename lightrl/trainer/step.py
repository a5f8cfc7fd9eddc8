"""One step of the trainer as its groups come in: what of it the ranks accumulate when.

Owns the shards that were taken and the commands that make gradients of them. Which groups at once
is `trainer.portions`' business, how they are packed `trainer.batch`'s, what they are worth
`trainer.advantage`'s; the supervisor says when the step advances, begins anew and ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from lightrl.config.schema import Config
from lightrl.messages.message import Message
from lightrl.messages.training import ShardsTaken, TrainGroup, TrainShard
from lightrl.trainer.algorithm.advantage import train_samples
from lightrl.trainer.batch import streamed, surprisal_of_rest, total_tokens, useful
from lightrl.trainer.node_devices import NodeDevices
from lightrl.trainer.portions import Portions
from lightrl.trainer.protocol import (
    Cleared,
    ClearStep,
    ParkRank,
    RankParked,
    TrainSample,
    Updated,
    UpdateWeights,
)
from lightrl.trainer.rank_processes import Ranks
from lightrl.trainer.replicas import Replicas
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
        changed: Callable[[], None],
        devices: NodeDevices,
    ) -> None:
        """`waiting`: where shards come in; those of this step are taken from its front. `changed`
        is called when it may be able to go on. `devices`: which others may ask for. Always `close`
        it."""
        self._config = config
        self._ranks = ranks
        self._waiting = waiting
        self._is_packed = is_packed
        self._send = send
        self._devices = devices
        halts = (lambda: self._must_park) if devices.are_shared else None
        may_work = devices.is_given_to
        self._replicas = Replicas(ranks, config.train.replicas, changed, halts, may_work)
        self._begin(step)

    @property
    def can_go_on(self) -> bool:
        """Something has come, or all has, not all ranks are busy, and they may have their devices;
        or they are to give them back."""
        if self._must_park:
            return True
        if not self._devices.is_given:
            return False
        if self._replicas.have_more:
            return True
        if self.queue.is_accumulated or self.queue.has_mini_batch:  # all ranks update
            return self._devices.all_given and not self.is_busy
        some = self._waiting or self._is_held_up or self.queue.has_whole
        return self._replicas.have_room and bool(some)

    @property
    def has_all(self) -> bool:
        """Its last shard has come, so that it ends without any other word."""
        step = self.queue.step
        return self.queue.is_complete or any(s.last for s in self._waiting if s.step == step)

    @property
    def _must_park(self) -> bool:
        """Before it goes on. A step of which all has come ends first, and parks then."""
        return self._devices.is_asked and not (self.has_all and self._devices.all_given)

    @property
    def awaits_devices(self) -> bool:
        """It ends as soon as the ranks get the rest of them."""
        return self.has_all and self._devices.is_given and not self._devices.all_given

    @property
    def is_busy(self) -> bool:
        """Some ranks compute."""
        return not self._replicas.are_idle

    @property
    def is_accumulated(self) -> bool:
        is_done = self.queue.is_accumulated and not (self._replicas.have_more or self.is_busy)
        return is_done and self._devices.all_given

    @property
    def is_begun_anew(self) -> bool:
        """By the coordinator, on its own."""
        return self.queue.is_begun_anew_by(self._waiting)

    async def begin_anew(self) -> None:
        """The ranks forget what they have of it; weights that it has moved are what they were."""
        step = self.queue.step
        self._replicas.drop()
        await self.settle()
        if self.queue.portions:
            self._ranks.tell(ClearStep(step))
            await self._ranks.replies(Cleared)
        self._begin(step)

    async def advance(self) -> None:
        """Takes what waits, has replicas that are free accumulate it as soon as that is
        due, and all ranks update with a mini-batch that is complete, unless it is the last: that is
        what ends the step. Where ranks must park in the middle of that it is continued by a later
        call."""
        queue = self.queue
        if self._must_park:
            await self.settle()
            self._ranks.tell(ParkRank(queue.step))
            await self._ranks.replies(RankParked)
            return
        self._replicas.go_on()
        queue.held += [train_samples(group, self._config) for group in self._next_groups()]
        self._accumulate()
        if queue.has_mini_batch:
            await self.settle()
            if self._replicas.have_more or not self._devices.all_given:
                return
            self._ranks.tell(UpdateWeights(queue.step, queue.num_responses, queue.num_tokens))
            await self._ranks.replies(Updated)
            queue.next_mini_batch()
            self._portions.next_mini_batch()

    async def settle(self) -> None:
        """Until no rank computes; what they were not told yet stays."""
        await self._replicas.settle()

    def times(self, finish_begun_at: float) -> dict[str, float]:
        """What it took, by this daemon's clock: its version has just been announced."""
        return {
            "timing_s/accumulate": self._replicas.busy_s,
            "timing_s/finish": asyncio.get_running_loop().time() - finish_begun_at,
        }

    def entropy(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Mean over all response tokens of the step [nats]: `metrics` of the ranks has the mean
        over those that they computed, the rest is estimated by its surprisal."""
        (nats, num_rest), computed = self._rest, metrics.get("num_trained_tokens", 0.0)
        if "entropy" not in metrics or not computed + num_rest:
            return {}
        return {"entropy": (metrics["entropy"] * computed + nats) / (computed + num_rest)}

    async def close(self) -> None:
        await self._replicas.close()

    def _begin(self, step: int) -> None:
        config, train = self._config, self._config.train
        self.queue = ShardQueue(step)
        full = self._replicas.num_ranks * train.max_tokens_per_gpu
        self._rest = [0.0, 0.0]  # see `surprisal_of_rest`
        self._is_held_up = False  # some groups only wait for a replica that is free
        self._portions = Portions(train.replicas, full, config.run.deterministic)

    def _next_groups(self) -> list[TrainGroup]:
        """What waits; while it is trained, the coordinator may send as much again."""
        index = self.queue.index
        groups = self.queue.pop_groups(self._waiting)
        if self.queue.index > index:
            self._send(ShardsTaken(self.queue.step, self.queue.index - 1))
        return groups

    def _accumulate(self) -> None:
        """What is due of all that is held."""
        queue = self.queue
        sizes = [total_tokens(samples) for samples in useful(queue.held, self._config)]
        # A deterministic step has the same micro-batches however few wait.
        is_all = self._config.run.deterministic or queue.must_not_wait(self._waiting)
        while sizes:
            if queue.replica is not None:
                due = self._portions.give(queue.replica, sizes)
            else:
                due = self._portions.take(sizes, self._replicas.free, is_all)
            if due is None:
                break
            replica, num = due
            sizes = sizes[num:]
            self._compute(replica, queue.give_out(num, replica))
        self._is_held_up = bool(sizes) and not self._replicas.free

    def _compute(self, replica: int, groups: Sequence[list[TrainSample]]) -> None:
        config, num = self._config, self._replicas.num_ranks
        rest = surprisal_of_rest([s for samples in groups for s in samples], config.algorithm)
        self._rest = [a + b for a, b in zip(self._rest, rest, strict=True)]
        most, in_order = config.train.max_tokens_per_gpu, config.run.deterministic
        batches_R = streamed(useful(groups, config), num, most, in_order, self._is_packed)
        is_last = self.queue.has_whole and not self.queue.held
        self._replicas.accumulate(replica, self.queue.step, batches_R, is_last)
