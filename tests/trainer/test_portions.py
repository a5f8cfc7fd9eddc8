"""Which groups replicas get: all of them, fewer at a time towards the end, and in a deterministic
step by the groups alone."""

import random

from lightrl.trainer.portions import Portions
from lightrl.trainer.protocol import AT_ONCE


def dealt(sizes, replicas=2, full=100, is_fixed=False, busy=()):
    """All that waits, to replicas that are free again as soon as they were given something."""
    portions, parts = Portions(replicas, full, is_fixed), []
    free = [r for r in range(replicas) if r not in busy]
    while (due := portions.take(sizes, free, True)) is not None:
        parts.append(due)
        sizes = sizes[due[1] :]
    return parts


def test_portions_become_smaller_towards_the_end():
    parts = dealt([50] * 40, full=100)
    sizes = [num for _, num in parts]
    assert sum(sizes) == 40
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 10  # half of a share
    assert sizes[-1] == 1  # a micro-batch, and then what is left of it for each
    loads = [sum(num for r, num in parts if r == replica) for replica in (0, 1)]
    assert max(loads) - min(loads) <= 2


def test_a_portion_is_at_most_what_is_computed_between_two_signs_of_life():
    assert dealt([10] * 10_000, full=100)[0] == (0, 10 * AT_ONCE)


def test_a_few_groups_are_spread_though_together_they_fill_no_micro_batch():
    assert dealt([5, 5, 5, 5]) == [(0, 2), (1, 1), (1, 1)]
    assert dealt([5, 5, 5, 5], busy=[0]) == [(1, 4)]
    assert dealt([0, 0, 0]) == [(0, 3)]
    assert dealt([500, 5]) == [(0, 1), (1, 1)]


def test_groups_wait_for_others_or_for_a_replica_that_is_free():
    portions = Portions(2, 100, False)
    assert portions.take([40, 59], [0, 1], False) is None
    assert portions.take([40, 60], [], True) is None
    assert portions.take([40, 60], [1], False) == (1, 2)
    assert portions.take([], [0, 1], True) is None


def test_one_replica_takes_all_that_waits():
    portions = Portions(1, 100, False)
    assert portions.take([40, 59], [0], False) is None
    assert portions.take([40, 60] * 50, [0], False) == (0, 100)
    assert portions.take([1], [0], True) == (0, 1)


def test_a_fixed_split_follows_from_the_groups_alone():
    sizes = [random.Random(4).randint(1, 300) for _ in range(50)]
    expected = dealt(sizes, is_fixed=True)
    assert all(num == 1 for _, num in expected)
    for cut in (1, 7, 30):
        portions, parts = Portions(2, 100, True), []
        for part in (sizes[:cut], sizes[cut:]):
            while (due := portions.take(part, [], False)) is not None:
                parts.append(due)
                part = part[1:]
        assert parts == expected
    loads = [sum(s for s, (r, _) in zip(sizes, expected, strict=True) if r == k) for k in (0, 1)]
    assert abs(loads[0] - loads[1]) <= max(sizes)


def test_what_other_replicas_did_is_spread_over_those_that_are_left():
    assert Portions(2, 100, False).give(3, [1, 2]) == (1, 2)
