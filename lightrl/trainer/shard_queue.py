"""The shards of one step as they come in: which are next, which are accumulated together, which
update they belong to, what was counted.

Pure: no ranks, no clock. What is trained when is `trainer.step`'s business.
"""

from collections import deque
from collections.abc import Sequence
from sys import maxsize

from lightrl.errors import TrainerError
from lightrl.loss_mask import num_trained
from lightrl.messages.training import TrainGroup, TrainShard
from lightrl.trainer.protocol import TrainSample


class ShardQueue:
    """Mini-batches follow from the order of the groups alone, so that a step that is trained again
    in that order has the same: one ends with each `prompts_per_step // mini_batches` groups, the
    last one with the step. A step of fewer groups has fewer of them."""

    def __init__(self, step: int, prompts_per_step: int = 1, mini_batches: int = 1) -> None:
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
        self._size = prompts_per_step // mini_batches
        self._num_more = mini_batches - 1  # mini-batches after this one
        self._counted = 0  # groups of this one

    @property
    def can_go_on(self) -> bool:
        """Without another shard."""
        return self.is_complete or bool(self._rest)

    @property
    def is_accumulated(self) -> bool:
        return self.is_complete and not self.held and not self._rest

    @property
    def has_mini_batch(self) -> bool:
        """All groups of a mini-batch were accumulated, and the step may have others. Where it has
        none after all, what ends the step has nothing to update."""
        is_last = self.is_complete and not self._rest
        return self._num_more > 0 and self._counted == self._size and not is_last

    @property
    def ends_mini_batch(self) -> bool:
        """An update follows on what is held, which may be that of the step."""
        is_last = self.is_complete and not self._rest
        return is_last or (self._num_more > 0 and self._counted + len(self.held) == self._size)

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
        room = self._room - len(self.held)
        groups = self._take(room)
        while waiting and not self.is_complete and len(groups) < room:
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
            groups += self._take(room - len(groups))
            self._was_alone = shard.alone
            self.replica = shard.replica if shard.alone else None
            if shard.alone:
                break
        return groups

    def must_not_wait(self, waiting: deque[TrainShard]) -> bool:
        """For other groups: none come, or those that do are to be accumulated apart."""
        is_full = len(self.held) >= self._room
        is_apart = self._was_alone or (bool(waiting) and waiting[0].alone)
        return self.is_complete or is_full or is_apart

    def give_out(self, num: int, replica: int = 0) -> Sequence[list[TrainSample]]:
        """So many groups are accumulated at once by a replica, and are held no longer."""
        groups, self.held = self.held[:num], self.held[num:]
        self.portions.append(num)
        self.replicas.append(replica)
        self._counted += len(groups)
        self.num_responses += sum(map(len, groups))
        self.num_tokens += sum(
            num_trained(s.token_ids, s.loss_mask) for samples in groups for s in samples
        )
        return groups

    def next_mini_batch(self) -> None:
        self._num_more -= 1
        self._counted = self.num_responses = self.num_tokens = 0

    @property
    def _room(self) -> int:
        """Groups that the mini-batch lacks."""
        return self._size - self._counted if self._num_more else maxsize

    def _take(self, most: int) -> list[TrainGroup]:
        return [self._rest.popleft() for _ in range(min(most, len(self._rest)))]

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
