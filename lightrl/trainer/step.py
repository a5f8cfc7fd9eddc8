"""One step of the trainer while its groups arrive: what the ranks accumulate when.

`shard_queue` decides which groups go together, `batch` how they are packed, `algorithm.advantage`
what they are worth; the supervisor decides when the step advances, restarts and ends. Must not
import torch: the daemon imports this file.
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
from lightrl.trainer.protocol import (
    MAX_BATCHES,
    Accumulate,
    Done,
    MicroBatch,
    ResetStep,
    Suspend,
    TrainSample,
    Update,
)
from lightrl.trainer.rank_processes import Ranks
from lightrl.trainer.shard_queue import ShardQueue


class Replicas:
    """The replicas of the model (`train.replicas`) in one step: each computes its own groups.
    Always `close` it."""

    def __init__(self, ranks: Ranks, num: int, changed: Callable[[], None]) -> None:
        """`changed` is called when a replica has computed all that it got."""
        self._ranks = ranks
        self._changed = changed
        self.num_ranks = len(ranks) // num  # of each
        self._unanswered = [0] * num  # commands
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.busy_s = 0.0  # seconds in which any of them computed
        self._busy_since = 0.0

    @property
    def idle(self) -> list[int]:
        """Replicas that have nothing to compute. Raises the error of a failed task."""
        for task in self._tasks.values():
            if task.done():
                task.result()
        return [replica for replica, num in enumerate(self._unanswered) if not num]

    @property
    def are_idle(self) -> bool:
        return len(self.idle) == len(self._unanswered)

    def accumulate(
        self, replica: int, step: int, batches_R: Sequence[tuple[MicroBatch, ...]]
    ) -> None:
        """Send each rank of the replica its micro-batches, equally many."""
        num, was_idle = len(batches_R[0]), not self._unanswered[replica]
        if not any(self._unanswered):  # before the ranks can begin
            self._busy_since = asyncio.get_running_loop().time()
        for start in range(0, num, MAX_BATCHES):
            for rank, batches in zip(self._members(replica), batches_R, strict=True):
                self._ranks.send(rank, Accumulate(step, batches[start : start + MAX_BATCHES]))
            self._unanswered[replica] += 1
        if num and was_idle:
            self._tasks[replica] = task = asyncio.ensure_future(self._answers(replica))
            task.add_done_callback(lambda _: self._changed())

    async def settle(self) -> None:
        """Wait until no rank computes."""
        await asyncio.gather(*self._tasks.values())

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answers(self, replica: int) -> None:
        while self._unanswered[replica]:
            await self._ranks.replies(Done, ranks=self._members(replica))
            self._unanswered[replica] -= 1
            if not any(self._unanswered):
                self.busy_s += asyncio.get_running_loop().time() - self._busy_since

    def _members(self, replica: int) -> range:
        """Ranks of a replica, neighbours as in FSDP's mesh."""
        return range(replica * self.num_ranks, (replica + 1) * self.num_ranks)


class Step:
    """Trains one step while its groups arrive. Owns the groups that the ranks have not accumulated;
    decides when they do, and in which micro-batches."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        step: int,
        waiting: deque[TrainShard],
        devices: NodeDevices,
        send: Callable[[Message], None],
        changed: Callable[[], None],
    ) -> None:
        """`waiting`: shards as they arrive; those of this step are taken from its front. `changed`
        is called when the step may be able to advance. Always `close` it."""
        self._config = config
        self._ranks = ranks
        self._waiting = waiting
        self._send = send
        self._devices = devices
        self._replicas = Replicas(ranks, config.train.replicas, changed)
        self._full = self._replicas.num_ranks * config.train.max_tokens_per_gpu
        self._in_order = config.run.deterministic  # the same micro-batches however few groups wait
        self._begin(step)

    @property
    def can_advance(self) -> bool:
        """`advance` has something to do, and the ranks that it needs are idle and have devices."""
        if self._must_suspend:
            return True
        if not self._devices.is_given:
            return False
        if self.queue.is_accumulated or self.queue.has_mini_batch:  # all ranks update
            return self._devices.all_given and not self.is_busy
        waits = self._waiting or self._has_due or self.queue.has_whole
        needed, free = None, self._free
        if self._devices.are_shared and self.queue.held:
            needed = self.queue.next_replica(self._in_order)
        return bool(waits and free) and (needed is None or needed in free)

    @property
    def has_all(self) -> bool:
        """Its last shard has arrived, so that the step ends without any other message."""
        step = self.queue.step
        return self.queue.is_complete or any(s.last for s in self._waiting if s.step == step)

    @property
    def _must_suspend(self) -> bool:
        """The devices are wanted back, and the step cannot end before."""
        return self._devices.is_asked and not (self.has_all and self._devices.all_given)

    @property
    def awaits_devices(self) -> bool:
        """The step ends as soon as the ranks get the rest of their devices."""
        return self.has_all and self._devices.is_given and not self._devices.all_given

    @property
    def is_busy(self) -> bool:
        """Return whether some ranks compute."""
        return not self._replicas.are_idle

    @property
    def is_accumulated(self) -> bool:
        return self.queue.is_accumulated and not self.is_busy and self._devices.all_given

    @property
    def is_restarted(self) -> bool:
        """The coordinator sends the step again."""
        return self.queue.is_restarted_by(self._waiting)

    async def reset(self) -> None:
        """Start again from shard 0; the ranks undo what they did of the step."""
        step = self.queue.step
        await self.settle()
        if self.queue.portions:
            self._ranks.send_all(ResetStep(step))
            await self._ranks.replies(Done)
        self._begin(step)

    async def advance(self) -> None:
        """Take the shards that wait, give them to free replicas as soon as that is due, and update
        with a mini-batch that is complete, unless it is the last."""
        queue = self.queue
        if self._must_suspend:
            await self.settle()
            self._ranks.send_all(Suspend(queue.step))
            await self._ranks.replies(Done)
            return
        queue.held += [train_samples(group, self._config) for group in self._next_groups()]
        self._accumulate()
        if queue.has_mini_batch:
            await self.settle()
            if not self._devices.all_given:
                return
            self._ranks.send_all(Update(queue.step, queue.num_responses, queue.num_tokens))
            await self._ranks.replies(Done)
            queue.next_mini_batch()

    async def settle(self) -> None:
        """Wait until no rank computes."""
        await self._replicas.settle()

    def times(self, finish_began_at: float) -> dict[str, float]:
        """Seconds by this daemon's clock, when the step's version has just been announced."""
        return {
            "timing_s/accumulate": self._replicas.busy_s,
            "timing_s/finish": asyncio.get_running_loop().time() - finish_began_at,
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
        self.queue = ShardQueue(step, self._config.train.replicas)
        self._rest = [0.0, 0.0]  # see `surprisal_of_rest`
        self._has_due = False  # groups wait for a replica alone

    def _next_groups(self) -> list[TrainGroup]:
        """Take what waits; ShardsTaken lets the coordinator send more meanwhile."""
        index = self.queue.index
        groups = self.queue.pop_groups(self._waiting)
        if self.queue.index > index:
            self._send(ShardsTaken(self.queue.step, self.queue.index - 1))
        return groups

    def _accumulate(self) -> None:
        """Give out what is due of the groups that are held; on shared devices little at a time, as
        the ranks may have to be suspended."""
        queue, is_shared = self.queue, self._devices.are_shared
        sizes = [total_tokens(samples) for samples in useful(queue.held, self._config)]
        is_all = self._in_order or queue.must_not_wait(self._waiting)
        while True:
            is_due, most = is_all or sum(sizes) >= self._full, self._full if is_shared else None
            share = queue.next_share(sizes, self._free, is_due, self._in_order, most)
            if share is None:
                break
            replica, num = share
            sizes = sizes[num:]
            self._compute(replica, queue.give_out(num, replica))
        self._has_due = bool(sizes) and is_due

    @property
    def _free(self) -> list[int]:
        """Replicas that have their devices and nothing to compute."""
        return [k for k in self._replicas.idle if self._devices.is_given_to(k)]

    def _compute(self, replica: int, groups: Sequence[list[TrainSample]]) -> None:
        config, num = self._config, self._replicas.num_ranks
        rest = surprisal_of_rest([s for samples in groups for s in samples], config.algorithm)
        self._rest = [a + b for a, b in zip(self._rest, rest, strict=True)]
        most, is_packed = config.train.max_tokens_per_gpu, self._ranks.is_packed
        batches_R = streamed(useful(groups, config), num, most, self._in_order, is_packed)
        self._replicas.accumulate(replica, self.queue.step, batches_R)
