"""A line is found in what was observed; a prior says what cannot be known yet."""

import random

import pytest

from lightrl.core.nodes.line_fit import LineFit


def fitted(points: list[tuple[float, float]], keep: float = 1.0) -> LineFit:
    line = LineFit()
    for x, y in points:
        line.add(x, y, keep)
    return line


def test_a_line_without_noise_is_found():
    line = fitted([(x, 3.0 + 0.5 * x) for x in (1.0, 2.0, 7.0)])
    assert line.slope(prior=9.0, weight=1e-12) == pytest.approx(0.5)
    assert line.means() == (pytest.approx(10 / 3), pytest.approx(3.0 + 5 / 3))


def test_it_is_the_least_squares_line():
    rng = random.Random(1)
    points = [(float(x), 2.0 + rng.random()) for x in range(20)]
    mean_x, mean_y = (sum(v) / 20 for v in zip(*points, strict=True))
    wanted = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    assert fitted(points).slope(0.0, 1e-12) == pytest.approx(wanted)


def test_one_x_leaves_the_slope_to_the_prior():
    assert fitted([(4.0, 1.0), (4.0, 3.0)]).slope(prior=0.25, weight=0.1) == pytest.approx(0.25)


def test_the_weight_of_the_prior_is_in_units_of_the_spread():
    line = fitted([(0.0, 0.0), (2.0, 2.0)])  # variance 1, slope 1
    assert line.slope(prior=0.0, weight=1.0) == pytest.approx(0.5)


def test_the_past_is_forgotten():
    line = fitted([(float(x), 0.0) for x in range(50)] + [(1.0, 1.0), (2.0, 2.0)], keep=1e-6)
    assert line.slope(prior=0.0, weight=1e-15) == pytest.approx(1.0, rel=0.01)
