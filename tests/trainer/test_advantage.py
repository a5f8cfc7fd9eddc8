import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrl.config_sections import ALGORITHMS
from lightrl.errors import TrainerError
from lightrl.trainer import loss
from lightrl.trainer.advantage import ALGORITHM, advantages, overlong_penalty

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
        ("reinforce++", CENTRED),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_advantages_by_hand(name, expected):
    assert advantages(name, [1, 0, 0, 0]) == pytest.approx(expected, rel=1e-12)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    assert advantages("rloo", [3.0, 1.0, 2.0]) == pytest.approx([1.5, -1.5, 0.0])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1, 0.1, 0.1], [1.0] * 7])
def test_equal_rewards_give_no_signal_at_all(name, rewards):
    assert advantages(name, rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(TrainerError, match="finite"):
        advantages("grpo", [0.0, bad])


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (120, -1.0)],
)
def test_overlong_penalty_by_hand(length, penalty):
    assert overlong_penalty(length, max_length=100, buffer=20) == pytest.approx(penalty)
    assert overlong_penalty(length, max_length=100, buffer=0) == 0.0


def test_every_algorithm_of_the_config_has_advantages_and_a_loss():
    assert set(ALGORITHM) == set(loss.ALGORITHM) == set(ALGORITHMS)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.sampled_from(ALGORITHMS))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, name):
    values = advantages(name, rewards)
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-6)
    ranked = [a for _, a in sorted(zip(rewards, values, strict=True))]
    assert ranked == sorted(ranked)
