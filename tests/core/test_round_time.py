"""How long a round takes, by what steps cost and caches hold: against numbers by hand."""

import pytest

from lightrl.core.round_time import EngineKind, prior_lengths, round_s
from lightrl.messages.load import StepCosts

ONE = StepCosts(base_s=1.0, response_s=0.1)


def test_all_run_at_once_and_leave_one_after_the_other():
    # 3 run for 2 steps, 2 for 3 more, 1 for 5 more
    seconds = 2 * 1.3 + 3 * 1.2 + 5 * 1.1
    assert round_s(EngineKind(1, 8, 0, ONE), [2, 5, 10], 7) == pytest.approx(seconds)


def test_who_has_no_slot_waits():
    assert round_s(EngineKind(1, 1, 0, ONE), [2, 5, 10], 7) == pytest.approx(17 * 1.1)


def test_context_and_prefill_cost_what_they_cost():
    costs = StepCosts(1.0, 0.0, token_s=0.01, prefill_s=0.5)
    # 2 responses of 3 tokens with prompts of 10: contexts of 20, 22 and 24 tokens
    assert round_s(EngineKind(1, 8, 0, costs), [3, 3], 10) == pytest.approx(10 + 3 + 0.66)


def test_the_engine_with_the_longest_decides():
    assert round_s(EngineKind(2, 8, 0, ONE), [10, 4, 3, 3], 0) == pytest.approx(3 * 1.2 + 7 * 1.1)


def test_who_does_not_fit_waits_and_who_grows_out_of_the_cache_is_computed_anew():
    roomy = round_s(EngineKind(1, 8, 1000, ONE), [30] * 4, 10)
    assert roomy == pytest.approx(30 * 1.4)
    tight = round_s(EngineKind(1, 8, 80, ONE), [30] * 4, 10)
    assert tight == pytest.approx(60 * 1.2, rel=0.15)  # two at a time
    costly = StepCosts(1.0, 0.1, prefill_s=1.0)
    again = round_s(EngineKind(1, 8, 80, costly), [30] * 4, 10) - tight
    assert again > 4 * 10  # more than the prompts


def test_one_that_is_larger_than_the_cache_is_still_done():
    assert round_s(EngineKind(1, 8, 5, ONE), [30], 10) == pytest.approx(30 * 1.1)


def test_nothing_takes_no_time_and_an_enormous_round_little_of_ours():
    assert round_s(EngineKind(4, 8, 0, ONE), [], 10) == 0.0
    many = round_s(EngineKind(1, 256, 300, ONE), [200] * 5000, 1)
    assert many == pytest.approx(5000 * 200 * 1.1, rel=0.6)  # 1 or 2 at a time


def test_lengths_that_nobody_knows_are_within_the_limit_longest_first():
    lengths = prior_lengths(100, 1000)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 1000
    assert 200 < sum(lengths) / 100 < 260
