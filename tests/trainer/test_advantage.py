import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrl.config.algorithm import ALGORITHMS, UNGROUPED
from lightrl.errors import TrainerError
from lightrl.trainer.algorithm import loss
from lightrl.trainer.algorithm.advantage import ADVANTAGES, advantages, overlong_penalty, whitened
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import LARGEST_F32, fits_f32

# Rewards 1, 0, 0, 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, std 1/2.
STANDARDIZED = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
CENTRED = [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", STANDARDIZED),
        ("dapo", STANDARDIZED),
        ("gspo", STANDARDIZED),
        ("cispo", STANDARDIZED),
        ("dr_grpo", CENTRED),
        ("reinforce++", [1, 0, 0, 0]),
        ("reinforce++-baseline", CENTRED),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_advantages_by_hand(name, expected):
    assert advantages(name, [1, 0, 0, 0]) == pytest.approx(expected, rel=1e-12)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    assert advantages("rloo", [3.0, 1.0, 2.0]) == pytest.approx([1.5, -1.5, 0.0])


GROUPED = sorted({*ALGORITHMS} - UNGROUPED)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1, 0.1, 0.1], [1.0] * 7])
def test_equal_rewards_give_no_signal_at_all(name, rewards):
    assert advantages(name, rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1, 0.1, 0.1]])
def test_where_nothing_is_compared_a_group_of_one_has_its_reward(rewards):
    assert advantages("reinforce++", rewards) == rewards


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e155, -1e300, 3.5e38])
def test_a_reward_outside_float32_is_refused_by_its_value(name, bad):
    with pytest.raises(TrainerError, match=re.escape(f"a reward is {bad}: all must be finite")):
        advantages(name, [0.0, bad])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_largest_rewards_have_advantages_that_float32_holds(name):
    found = advantages(name, [LARGEST_F32, -LARGEST_F32, 0.0, 1.0])
    assert all(map(fits_f32, found))
    white = whitened(batches([(found[0], 1), (found[1], 1)]), lambda parts: parts)
    assert values(white) == [pytest.approx([0.5**0.5, -(0.5**0.5)])]


def test_an_advantage_outside_float32_is_refused_before_it_is_whitened():
    with pytest.raises(TrainerError, match=r"advantage is 1e\+155: all must be finite"):
        whitened(batches([(1e155, 1), (0.0, 1)]), lambda parts: parts)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (120, -1.0)],
)
def test_overlong_penalty_by_hand(length, penalty):
    assert overlong_penalty(length, max_length=100, buffer=20) == pytest.approx(penalty)
    assert overlong_penalty(length, max_length=100, buffer=0) == 0.0


def test_every_algorithm_of_the_config_has_advantages_and_a_loss():
    assert set(ADVANTAGES) == set(loss.RECIPES) == set(ALGORITHMS)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.sampled_from(GROUPED))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, name):
    values = advantages(name, rewards)
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-6)
    ranked = [a for _, a in sorted(zip(rewards, values, strict=True))]
    assert ranked == sorted(ranked)


def batches(*rows):
    """(advantage, tokens) of each sample of each batch."""
    return [
        tuple(TrainSample("p#0", b"", bytes(4 * n), b"", value) for value, n in row) for row in rows
    ]


def values(found):
    return [[s.advantage for s in batch] for batch in found]


def test_whitening_by_hand_is_over_tokens_mean_included():
    # tokens 4, 4, 4 and 0: mean 3, variance (1 + 1 + 1 + 9) / 3 = 4
    found = whitened(batches([(4.0, 3), (0.0, 1)], [], [(7.0, 0)]), lambda parts: parts)
    std = math.sqrt(4 + 1e-8)
    assert [list(map(pytest.approx, row)) for row in ([1 / std, -3 / std], [], [4 / std])] == (
        values(found)
    )


def test_whitening_over_two_ranks_is_that_of_one():
    """Each is told what both have added up; the sums of the other are those of the whole minus its
    own."""
    rows = [[(0.5, 7), (-2.0, 3)], [(1.5, 1), (0.25, 9), (0.5, 2)]]
    told = []
    together = values(whitened(batches(*rows), lambda parts: told.append(parts) or parts))
    for rank, row in enumerate(rows):
        sums = iter(told)
        assert values(whitened(batches(row), lambda parts, sums=sums: next(sums))) == [
            together[rank]
        ]


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6, math.pi])
def test_a_step_of_equal_advantages_has_no_signal(value):
    rows = batches([(value, 3), (value, 5)], [(value, 7)])
    assert values(whitened(rows, lambda parts: parts)) == [[0.0, 0.0], [0.0]]
    assert values(whitened(batches([(value, 1)]), lambda parts: parts)) == [[0.0]]
    assert whitened([], lambda parts: parts) == []
