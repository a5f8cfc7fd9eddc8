"""The shards of one step in the order of their arrival: which groups are next, which of them are
accumulated together by which replica, and which update they belong to.

Pure: no ranks, no clock. `trainer.step` decides when they are trained.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate

from lightrl.errors import TrainerError
from lightrl.messages.training import TrainGroup, TrainShard
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import num_trained


class ShardQueue:
    """Holds the groups of one step. Each names its mini-batch, so that a repeated step has the same
    ones. A mini-batch ends with the first group of the next, the last one with the step."""

    def __init__(self, step: int, replicas: int = 1) -> None:
        self.step = step
        self.is_complete = False  # the last shard was taken
        # groups that were taken and not yet accumulated
        self.held: list[list[TrainSample]] = []
        # groups accumulated at a time, also those without signal, and the replica that did it
        self.portions: list[int] = []
        self.replicas: list[int] = []
        # in a repeated step: the replica that accumulates all that is held
        self.replica: int | None = None
        # accumulated in this mini-batch
        self.num_responses = 0
        self.num_tokens = 0
        self.index = 0  # of the next shard
        self._loads = [0] * replicas  # tokens of the mini-batch, prompts included
        self._was_alone = False  # the last shard
        self._num_groups = 0
        self._rest: deque[TrainGroup] = deque()  # of later mini-batches
        self._mini_batch = 0

    @property
    def has_whole(self) -> bool:
        """All groups of the mini-batch were taken."""
        return self.is_complete or bool(self._rest)

    @property
    def is_accumulated(self) -> bool:
        """All groups of the step were given out."""
        return self.is_complete and not self.held and not self._rest

    @property
    def has_mini_batch(self) -> bool:
        """All groups of the mini-batch were given out, and the step has others."""
        return bool(self._rest) and not self.held and self._rest[0].mini_batch > self._mini_batch

    def is_restarted_by(self, waiting: deque[TrainShard]) -> bool:
        """The coordinator sends the step again from its first shard."""
        first = (waiting[0].step, waiting[0].index) if waiting else None
        return self.index > 0 and first == (self.step, 0)

    def pop_groups(self, waiting: deque[TrainShard]) -> list[TrainGroup]:
        """Take the groups that may be accumulated together: of all shards that wait, or of one that
        is alone, up to the end of the mini-batch.

        Drop shards of earlier steps, and leave those of the next step. Raise TrainerError for any
        shard of this step but the next.
        """
        groups = self._take()
        while waiting and not self.has_whole:
            shard = waiting[0]
            if shard.step < self.step:
                waiting.popleft()
                continue
            is_apart = bool(groups or self.held) and (shard.alone or self._was_alone)
            if is_apart or self.is_restarted_by(waiting):
                break
            self._check(waiting.popleft())
            self._rest += shard.groups
            groups += self._take()
            self._was_alone = shard.alone
            self.replica = shard.replica if shard.alone else None
            if shard.alone:
                break
        return groups

    def must_not_wait(self, waiting: deque[TrainShard]) -> bool:
        """No other groups are accumulated together with those that are held."""
        is_apart = self._was_alone or (bool(waiting) and waiting[0].alone)
        return self.has_whole or is_apart

    def next_replica(self, in_order: bool = False) -> int | None:
        """Return the replica that has to accumulate the next groups; None = any. In a repeated step
        it is the same as before; `in_order` it follows from the groups before."""
        if self.replica is not None:  # there may be fewer replicas now
            return self.replica % len(self._loads)
        return self._least_loaded(range(len(self._loads))) if in_order else None

    def next_share(
        self,
        sizes: Sequence[int],
        free: Collection[int],
        is_due: bool,
        in_order: bool = False,
        most: int | None = None,
    ) -> tuple[int, int] | None:
        """Return (replica, number of groups) of those that are held, with `sizes` tokens each; None
        if they wait for others or for a `free` replica.

        A replica takes its equal share of the groups that wait, or one after the other `in_order`,
        also while it is busy. With `most` it must be free, and takes no more groups than it needs
        for so many tokens. Example, of two replicas: next_share([60, 10, 10], {0, 1}, True) == (0,
        2)
        """
        if not sizes:
            return None
        num, share = len(self._loads), len(sizes)
        if (replica := self.next_replica(in_order and num > 1)) is None:
            if not (free and is_due):
                return None
            replica, share = self._least_loaded(free), -(-share // num)
            if most is not None:
                share = min(share, bisect_left(list(accumulate(sizes)), most) + 1)
        elif most is not None and replica not in free:
            return None
        elif self.replica is None:
            share = 1
        self._loads[replica] += sum(sizes[:share])
        return replica, share

    def give_out(self, num: int, replica: int = 0) -> Sequence[list[TrainSample]]:
        """Return the next `num` groups that are held, which `replica` accumulates."""
        groups, self.held = self.held[:num], self.held[num:]
        self.portions.append(num)
        self.replicas.append(replica)
        self.num_responses += sum(map(len, groups))
        self.num_tokens += sum(
            num_trained(s.token_ids, s.loss_mask) for samples in groups for s in samples
        )
        return groups

    def next_mini_batch(self) -> None:
        self._mini_batch = self._rest[0].mini_batch
        self.num_responses = self.num_tokens = 0
        self._loads = [0] * len(self._loads)

    def _least_loaded(self, among: Collection[int]) -> int:
        return min(among, key=lambda replica: (self._loads[replica], replica))

    def _take(self) -> list[TrainGroup]:
        """Pop the groups of this mini-batch."""
        taken: list[TrainGroup] = []
        while self._rest and self._rest[0].mini_batch <= self._mini_batch:
            taken.append(self._rest.popleft())
        return taken

    def _check(self, shard: TrainShard) -> None:
        # policy_version is the version that is updated; its tokens may be of older ones
        if (shard.step, shard.index, shard.policy_version) != (self.step, self.index, self.step):
            raise TrainerError(
                f"shard {shard.index} of step {shard.step} for version {shard.policy_version} came "
                f"instead of shard {self.index} of step {self.step} for version {self.step}"
            )
        self.index += 1
        self._num_groups += len(shard.groups)
        self.is_complete = shard.last
        if shard.last and self._num_groups != shard.num_groups:
            raise TrainerError(
                f"step {self.step}: {self._num_groups} of {shard.num_groups} groups came"
            )
