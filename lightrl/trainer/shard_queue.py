"""The shards of one step as they come in: which are next, which are accumulated together, which
update they belong to, what was counted.

Pure: no ranks, no clock. What is trained when is `trainer.step`'s business.
"""

from collections import deque
from collections.abc import Sequence

from lightrl.errors import TrainerError
from lightrl.loss_mask import num_trained
from lightrl.messages.training import TrainGroup, TrainShard
from lightrl.trainer.protocol import TrainSample


class ShardQueue:
    """Each group names its mini-batch, so that a step that is trained again has the same ones. One
    ends when a group of the next has come, the last one with the step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_complete = False  # the last shard was taken
        # came, but wait for others that fill a micro-batch with them
        self.held: list[list[TrainSample]] = []
        # groups that were accumulated at a time, also those without signal, and by which replica
        self.portions: list[int] = []
        self.replicas: list[int] = []
        # the one that is to accumulate what is held, all of it at once; None: any, in any portions
        self.replica: int | None = None
        # of the mini-batch, all that was accumulated
        self.num_responses = 0
        self.num_tokens = 0
        self.index = 0  # of the next shard
        self._was_alone = False  # the last one
        self._num_groups = 0
        self._rest: deque[TrainGroup] = deque()  # of shards that were taken, for later mini-batches
        self._mini_batch = 0  # that is accumulated

    @property
    def has_whole(self) -> bool:
        """No other group of the mini-batch comes. Between two calls of `pop_groups`, what it left
        is of later ones."""
        return self.is_complete or bool(self._rest)

    @property
    def is_accumulated(self) -> bool:
        return self.is_complete and not self.held and not self._rest

    @property
    def has_mini_batch(self) -> bool:
        """All groups of a mini-batch were accumulated, and the step has others."""
        return bool(self._rest) and not self.held and self._rest[0].mini_batch > self._mini_batch

    def is_begun_anew_by(self, waiting: deque[TrainShard]) -> bool:
        """The coordinator may begin a step again on its own."""
        return (
            bool(waiting)
            and self.index > 0
            and (waiting[0].step, waiting[0].index) == (self.step, 0)
        )

    def pop_groups(self, waiting: deque[TrainShard]) -> list[TrainGroup]:
        """The groups that may be accumulated at once: of all shards that wait, or of one that is
        alone, up to the end of the mini-batch.

        Shards of steps that are done are dropped: they are late. What comes after the last shard of
        the step stays where it is. Raises TrainerError for any shard but the next of this step.
        """
        groups = self._take()
        while waiting and not self.has_whole:
            shard = waiting[0]
            if shard.step < self.step:
                waiting.popleft()
                continue
            if ((groups or self.held) and (shard.alone or self._was_alone)) or (
                self.is_begun_anew_by(waiting)
            ):
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
        """For other groups: none come, or those that do are to be accumulated apart."""
        is_apart = self._was_alone or (bool(waiting) and waiting[0].alone)
        return self.has_whole or is_apart

    def give_out(self, num: int, replica: int = 0) -> Sequence[list[TrainSample]]:
        """So many groups are accumulated at once by a replica, and are held no longer."""
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

    def _take(self) -> list[TrainGroup]:
        """Groups of this mini-batch."""
        taken: list[TrainGroup] = []
        while self._rest and self._rest[0].mini_batch <= self._mini_batch:
            taken.append(self._rest.popleft())
        return taken

    def _check(self, shard: TrainShard) -> None:
        # The version is the one to be updated; the tokens may be of older ones.
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
