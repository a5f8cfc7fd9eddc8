"""How fast a node decodes is learned from its chunks."""

import random

import pytest

from lightrl.core.speed import PRIOR_HALF_BATCH, PRIOR_STEP_S, Speed
from lightrl.core.state import Node
from tests.core.conftest import Driver


def test_node_that_nobody_has_heard_of_is_assumed_to_be_ordinary():
    speed = Speed()
    assert speed.step_s(PRIOR_HALF_BATCH) == pytest.approx(2 * PRIOR_STEP_S)


@pytest.mark.parametrize("seed", range(10))
def test_base_and_slope_are_recovered_from_noisy_observations(seed: int):
    rng = random.Random(seed)
    base, slope = rng.uniform(0.005, 0.05), rng.uniform(0.0001, 0.001)
    speed = Speed()
    for _ in range(600):
        batch = rng.randint(1, 256)
        speed.observe(batch, (base + slope * batch) * rng.gauss(1.0, 0.05))
    for batch in (16, 64, 256):
        assert speed.step_s(batch) == pytest.approx(base + slope * batch, rel=0.1)
    assert speed.slope == pytest.approx(slope, rel=0.25)


def test_one_batch_size_gives_the_speed_there_and_a_slope_that_is_neither_zero_nor_all():
    speed = Speed()
    for _ in range(100):
        speed.observe(64, 0.08)
    assert speed.step_s(64) == pytest.approx(0.08)
    assert 0 < speed.slope < 0.08 / 64
    assert speed.base > 0


def test_node_that_becomes_slower_is_believed_soon():
    speed = Speed()
    for _ in range(500):
        speed.observe(8, 0.01)
    for _ in range(200):
        speed.observe(8, 0.05)
    assert speed.step_s(8) == pytest.approx(0.05, rel=0.05)


def test_step_never_takes_less_than_nothing_however_odd_the_observations():
    rng = random.Random(0)
    speed = Speed()
    for _ in range(500):
        batch = rng.randint(1, 300)
        speed.observe(batch, rng.expovariate(1.0) / batch)
        assert all(speed.step_s(b) > 0 for b in (1, 10, 100, 1000))


def test_time_in_which_a_node_had_nothing_to_do_is_not_held_against_it():
    d = Driver(prompts_per_step=1, group_size=1)
    d.start("a")
    node: Node = d.core.fleet.nodes["a"]
    d.now = 1.0
    d.tokens("p0@0#0", 1)
    d.now = 1.5
    d.tokens("p0@0#0", 1, 2)
    assert node.speed.step_s(1) == pytest.approx(0.25)
    d.finish("p0@0#0")
    d.now = 100.0
    d.next_step()
    d.now = 101.0
    d.tokens("p1@0#0", 1)
    assert node.speed.step_s(1) < 0.3
