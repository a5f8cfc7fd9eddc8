"""Which groups are accumulated at a time, and by which replica (`train.replicas`).

Pure: no ranks, no clock. Owns how the groups of a mini-batch are spread over the replicas; which of
them may be accumulated at all is `shard_queue`'s business, what a replica is at `replicas`'.
"""

from collections.abc import Collection, Sequence

from lightrl.trainer.protocol import AT_ONCE


class Portions:
    """Of one step. Replicas that are free take the next groups: many of them while many wait, fewer
    towards the end, so that all are done at about the same time (guided self-scheduling,
    Polychronopoulos and Kuck 1987, with half a share at a time as in factoring, Hummel et al.
    1992). `is_fixed`: which replica a group goes to follows from the groups before it alone.
    """

    def __init__(self, replicas: int, full: int, is_fixed: bool) -> None:
        """`full`: tokens that are a micro-batch on every rank of a replica."""
        self._full = full
        self._is_fixed = is_fixed
        self._given = [0] * replicas  # tokens of the mini-batch

    def next_mini_batch(self) -> None:
        self._given = [0] * len(self._given)

    def take(
        self, sizes: Sequence[int], free: Collection[int], is_all: bool
    ) -> tuple[int, int] | None:
        """(replica, how many groups from the front) of those that wait, with `sizes` tokens each;
        None if they wait for others, or for one that is `free`. `is_all`: no others come.

        Example, of two replicas: take([60, 10, 10], {0, 1}, True) == (0, 1)
        """
        num = len(self._given)
        if not sizes:
            return None
        if self._is_fixed and num > 1:
            return self._give(self._least(range(num)), sizes[:1])
        is_due = is_all or sum(sizes) >= self._full
        if not (free and is_due):
            return None
        if num == 1:
            return self._give(0, sizes)
        return self._give(self._least(free), sizes[: self._num_due(sizes, len(free))])

    def give(self, replica: int, sizes: Sequence[int]) -> tuple[int, int]:
        """As `take`, of groups that this one has accumulated at once when the step was trained
        before. There may be fewer replicas now."""
        return self._give(replica % len(self._given), sizes)

    def _num_due(self, sizes: Sequence[int], num_free: int) -> int:
        """Groups whose tokens do not exceed half a share of what waits, but fill a micro-batch; the
        last few are spread over those that are free. At least one."""
        left = sum(sizes)
        share = max(left // (2 * len(self._given)), min(self._full, -(-left // num_free)))
        room = min(share, AT_ONCE * self._full)
        for number, size in enumerate(sizes):
            room -= size
            if room < 0:
                return max(1, number)
        return len(sizes)

    def _least(self, among: Collection[int]) -> int:
        return min(among, key=lambda replica: (self._given[replica], replica))

    def _give(self, replica: int, sizes: Sequence[int]) -> tuple[int, int]:
        self._given[replica] += sum(sizes)
        return replica, len(sizes)
