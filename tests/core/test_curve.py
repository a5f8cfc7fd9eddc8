"""What follows from how long a step takes with each batch: the end of a decode, the best rate, the
peak."""

import random

import pytest

from lightrl.core.nodes.curve import Curve, rising

KNEE = Curve((1, 32, 128), (1.0, 1.0, 4.0), (0.0, 1 / 32, 1 / 32))  # seconds = max(1, b / 32)
CLIFF = Curve((1, 32, 33), (1.0, 1.1, 2.5), (0.1 / 31, 1.4, 0.01))
SLOPE = Curve((1,), (1.01,), (0.01,))  # seconds = 1 + b / 100


def decoded_s(curve: Curve, left: list[int]) -> float:
    """Step by step, whole steps."""
    seconds, steps = 0.0, 0
    while running := sum(n > steps for n in left):
        seconds += curve.at(running)
        steps += 1
    return seconds


@pytest.mark.parametrize("curve", [KNEE, CLIFF, SLOPE], ids=["knee", "cliff", "slope"])
@pytest.mark.parametrize("num", [1, 2, 31, 32, 33, 100, 200])
def test_end_of_a_decode_is_the_sum_of_its_steps(curve: Curve, num: int):
    rng = random.Random(num)
    left = sorted(rng.randint(1, 400) for _ in range(num))
    assert curve.finishes_in(left) == pytest.approx(decoded_s(curve, left))


def test_nothing_left_takes_no_time():
    assert KNEE.finishes_in([]) == 0.0


def test_best_rate_is_that_of_the_best_batch():
    assert [c.best_rate(128) for c in (KNEE, CLIFF)] == [32.0, pytest.approx(128 / 3.45)]
    assert CLIFF.best_rate(64) == pytest.approx(32 / 1.1)
    assert SLOPE.best_rate(16) == pytest.approx(16 / 1.16)


def test_only_a_cliff_has_a_peak_below_the_slots():
    assert CLIFF.peak(64) == 32
    assert CLIFF.peak(20) == 20
    assert [KNEE.peak(128), SLOPE.peak(128)] == [128, 128]


def test_fall_that_more_responses_make_up_for_is_no_peak():
    dent = Curve((1, 8, 9), (1.0, 1.0, 1.4), (0.0, 0.4, 0.0))
    assert dent.peak(64) == 64


@pytest.mark.parametrize("seed", range(20))
def test_curve_never_falls_however_odd_its_points(seed: int):
    rng = random.Random(seed)
    batches = sorted(rng.sample(range(1, 500), rng.randint(1, 9)))
    curve = rising([(b, rng.expovariate(1.0), rng.uniform(1, 50)) for b in batches], 0.001)
    seconds = [curve.at(b) for b in range(1, 600)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert 1 <= curve.peak(64) <= 64


def test_points_that_contradict_each_other_get_their_weighted_mean():
    curve = rising([(4, 2.0, 3.0), (8, 1.0, 1.0), (16, 5.0, 1.0)], 0.0)
    assert [curve.at(b) for b in (4, 8, 16)] == [1.75, 1.75, 5.0]
