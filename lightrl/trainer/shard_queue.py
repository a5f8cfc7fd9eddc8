"""The shards of one step as they come in: which are next, which are accumulated together, what was
counted.

Pure: no ranks, no clock. What is trained when is `trainer.supervisor`'s business.
"""

from collections import deque
from collections.abc import Sequence

from lightrl.errors import TrainerError
from lightrl.messages import TrainGroup, TrainShard
from lightrl.trainer.protocol import TrainSample


class ShardQueue:
    def __init__(self, step: int) -> None:
        self.step = step
        self.is_complete = False  # the last shard was taken
        # groups that were accumulated at a time, also those without signal
        self.portions: list[int] = []
        self.num_responses = 0
        self.num_tokens = 0
        self.index = 0  # of the next shard
        self._num_groups = 0

    def is_begun_anew_by(self, waiting: deque[TrainShard]) -> bool:
        """The coordinator may begin a step again on its own."""
        return (
            bool(waiting)
            and self.index > 0
            and (waiting[0].step, waiting[0].index) == (self.step, 0)
        )

    def pop_groups(self, waiting: deque[TrainShard]) -> list[TrainGroup]:
        """The groups that are to be accumulated at once: of all shards that wait, or of one that is
        alone.

        Shards of steps that are done are dropped: they are late. What comes after the last shard of
        the step stays where it is. Raises TrainerError for any shard but the next of this step.
        """
        groups: list[TrainGroup] = []
        while waiting and not self.is_complete:
            shard = waiting[0]
            if shard.step < self.step:
                waiting.popleft()
                continue
            if (groups and shard.alone) or self.is_begun_anew_by(waiting):
                break
            self._check(waiting.popleft())
            groups += shard.groups
            if shard.alone:
                break
        return groups

    def count(self, groups: Sequence[Sequence[TrainSample]]) -> None:
        """These were accumulated at once."""
        self.portions.append(len(groups))
        self.num_responses += sum(map(len, groups))
        self.num_tokens += sum(len(s.token_ids) // 4 for samples in groups for s in samples)

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
