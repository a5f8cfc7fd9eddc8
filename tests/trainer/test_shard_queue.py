"""Which groups of a step are accumulated together, and which update they belong to."""

import random
from collections import deque

import pytest

from lightrl.messages.training import TrainGroup, TrainShard
from lightrl.trainer.protocol import TrainSample
from lightrl.trainer.shard_queue import ShardQueue
from lightrl.wire import fits_mask, num_trained
from tests.support.masks import pack_mask


def shards(*sizes, each=8, alone=False):
    """Mini-batches of `each` groups."""
    made, first = [], 0
    for index, size in enumerate(sizes):
        groups = tuple(TrainGroup(f"p{i}", b"", (), i // each) for i in range(first, first + size))
        is_last = index == len(sizes) - 1
        made.append(TrainShard(0, index, 0, groups, is_last, sum(sizes), alone))
        first += size
    return made


def sample(group, loss_mask=b""):
    return TrainSample(group.group, b"", bytes(12), bytes(12), 1.0, loss_mask=loss_mask)


def take(queue, coming, is_due=lambda held: True, one_by_one=False):
    """All of a step. Returns the groups of each update, and how many had come when it was made."""
    waiting, updates, mine, came = deque(), [], [], []
    coming = deque(coming)
    while not queue.is_accumulated:
        if coming and not (queue.has_whole and one_by_one):
            waiting.append(coming.popleft())
            while coming and not one_by_one:
                waiting.append(coming.popleft())
        groups = queue.pop_groups(waiting)
        queue.held += [[sample(g)] for g in groups]
        if queue.held and (queue.must_not_wait(waiting) or is_due(queue.held)):
            mine += [s.response for samples in queue.held for s in samples]
            queue.give_out(len(queue.held))
        if queue.has_mini_batch:
            assert (queue.num_responses, queue.num_tokens) == (len(mine), 3 * len(mine))
            updates.append(mine)
            came.append(queue.index)
            queue.next_mini_batch()
            mine = []
    return [*updates, mine], came


@pytest.mark.parametrize("sizes", [(8,), (1,) * 8, (1, 2, 4, 1), (7, 0, 1), (3, 5, 0)])
@pytest.mark.parametrize("is_due", [lambda held: True, lambda held: len(held) >= 3])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_mini_batches_are_those_that_groups_name(sizes, is_due, one_by_one):
    for each in (8, 4, 2, 1, 3):
        queue = ShardQueue(0)
        updates, _ = take(queue, shards(*sizes, each=each), is_due, one_by_one)
        names = [f"p{i}" for i in range(8)]
        assert updates == [names[i : i + each] for i in range(0, 8, each)]
        again = ShardQueue(0)
        assert take(again, shards(*queue.portions, each=each, alone=True))[0] == updates
        assert again.portions == queue.portions


def test_an_update_waits_for_no_more_than_one_group_of_the_next():
    queue, coming = ShardQueue(0), shards(2, 1, 1, 4, each=2)
    assert take(queue, coming, lambda held: False, one_by_one=True)[1] == [2, 4, 4]


@pytest.mark.parametrize("sizes", [(3,), (4, 0), (4,), (1, 4)])
def test_no_update_has_no_groups(sizes):
    for one_by_one in (False, True):
        updates, _ = take(ShardQueue(0), shards(*sizes, each=2), one_by_one=one_by_one)
        assert [len(u) for u in updates] == {3: [2, 1], 4: [2, 2], 5: [2, 2, 1]}[sum(sizes)]


def test_portions_of_several_mini_batches_are_cut():
    queue = ShardQueue(0)
    updates, _ = take(queue, shards(3, 5, each=2, alone=True))
    assert list(map(len, updates)) == [2, 2, 2, 2]
    assert queue.portions == [2, 1, 1, 2, 2]


def test_a_mask_counts_what_is_trained():
    queue = ShardQueue(0)
    queue.held = [[sample(TrainGroup("a", b"", ()), pack_mask([True, False, True]))]]
    queue.give_out(1)
    assert (queue.num_responses, queue.num_tokens) == (1, 2)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 65])
def test_masks_have_a_bit_for_each_token(length):
    tokens = bytes(4 * length)
    assert pack_mask([True] * length) == b""
    assert num_trained(tokens, b"") == length
    flags = [i % 3 == 1 for i in range(length)]
    mask = pack_mask(flags)
    assert fits_mask(tokens, mask)
    assert len(mask) == -(-length // 8)
    assert num_trained(tokens, mask) == sum(flags)
    assert num_trained(tokens, pack_mask([False] * length)) == 0
    assert not fits_mask(tokens, mask + b"\x00")
    assert not fits_mask(tokens, pack_mask([False] * (8 * len(mask)) + [True]))
    if length % 8:
        assert not fits_mask(tokens, b"\xff" * len(mask))


def shares(sizes, replicas=2, in_order=False, free=None, queue=None):
    """All that waits, to replicas that are free again as soon as they got a share."""
    queue, parts = queue or ShardQueue(0, replicas), []
    free = range(replicas) if free is None else free
    while share := queue.next_share(sizes, free, True, in_order):
        parts.append(share)
        sizes = sizes[share[1] :]
    return parts


def test_shares_become_smaller_towards_the_end():
    parts = shares([50] * 40)
    sizes = [num for _, num in parts]
    assert sizes == [20, 10, 5, 3, 1, 1]
    assert [replica for replica, _ in parts] == [0, 1, 1, 1, 1, 1]
    assert shares([5, 5, 5], free=[1]) == [(1, 2), (1, 1)]
    assert shares([5, 5, 5], replicas=1) == [(0, 3)]


def test_groups_wait_until_they_are_due_and_a_replica_is_free():
    queue = ShardQueue(0, 2)
    assert queue.next_share([40, 59], [0, 1], False) is None
    assert queue.next_share([40, 60], [], True) is None
    assert queue.next_share([], [0, 1], True) is None
    queue.replica = 3  # in a repeated step, which had more replicas
    assert queue.next_share([40, 60], [], False) == (1, 2)


def test_shares_in_order_follow_from_the_groups_alone():
    sizes = [random.Random(4).randint(1, 300) for _ in range(50)]
    expected = shares(sizes, in_order=True)
    assert all(num == 1 for _, num in expected)
    for cut in (1, 7, 30):
        queue = ShardQueue(0, 2)
        parts = [
            share
            for part in (sizes[:cut], sizes[cut:])
            for share in shares(part, in_order=True, free=[], queue=queue)
        ]
        assert parts == expected
    loads = [sum(s for s, (r, _) in zip(sizes, expected, strict=True) if r == k) for k in (0, 1)]
    assert abs(loads[0] - loads[1]) <= max(sizes)


def test_on_shared_devices_shares_are_small_and_wait_for_their_replica():
    queue = ShardQueue(0, 2)
    assert queue.next_share([60, 60, 10, 10], [0, 1], True, most=100) == (0, 2)
    assert queue.next_share([60, 60, 10, 10], [1], True, most=50) == (1, 1)
    assert queue.next_share([10], [0], True, in_order=True, most=50) is None
    assert queue.next_share([10, 10], [1], True, in_order=True, most=50) == (1, 1)
    queue.replica = 0
    assert queue.next_share([10, 10], [1], True, most=50) is None
    assert queue.next_share([10, 10], [0], True, most=5) == (0, 2)
