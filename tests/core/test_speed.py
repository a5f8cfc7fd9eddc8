"""How fast a node decodes is learned from its chunks."""

import math
import random
from collections.abc import Callable
from statistics import median

import pytest

from lightrl.core.nodes.speed import PRIOR_HALF_BATCH, PRIOR_STEP_S, Speed
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
        assert speed.step_s(batch) == pytest.approx(base + slope * batch, rel=0.8)


def test_one_batch_size_gives_the_speed_there_and_a_slope_that_is_neither_zero_nor_all():
    speed = Speed()
    for _ in range(100):
        speed.observe(64, 0.08)
    assert speed.step_s(64) == pytest.approx(0.08, rel=0.02)
    slope = speed.step_s(128) - speed.step_s(127)
    assert 0 < slope < 0.08 / 64
    assert speed.step_s(1) > slope


def test_node_that_becomes_slower_is_believed_soon():
    speed = Speed()
    for _ in range(500):
        speed.observe(8, 0.01)
    for _ in range(500):
        speed.observe(8, 0.05)
    assert speed.step_s(8) == pytest.approx(0.05, rel=0.05)


def test_step_never_takes_less_than_nothing_however_odd_the_observations():
    rng = random.Random(0)
    speed = Speed()
    for _ in range(500):
        batch = rng.randint(1, 300)
        speed.observe(batch, rng.expovariate(1.0) / batch)
        assert all(speed.step_s(b) > 0 for b in (1, 10, 100, 1000))


@pytest.mark.parametrize("seed", range(20))
def test_estimate_does_not_run_away_when_chunks_come_late_and_then_together(seed: int):
    """On a machine that does much else: of a hundred observations a few are far off. The estimate
    is then rough, but no node seems a hundred times as slow as it is."""
    rng, speed = random.Random(seed), Speed()
    off: list[float] = []
    for k in range(300):
        batch = rng.choice((16, 16, 16, 15, 14, 12, 10, 8, 7, 4, 3, 1))
        seconds = (0.005 + 0.001 * batch) * rng.lognormvariate(0.0, 0.3)
        speed.observe(batch, seconds * rng.choices((1, 0.01, 6), (94, 3, 3))[0])
        if k > 20:
            off += [abs(math.log(speed.step_s(b) / (0.005 + 0.001 * b))) for b in (4, 16)]
    assert math.exp(max(off)) < 20
    assert math.exp(median(off)) < 2


def test_time_in_which_a_node_had_nothing_to_do_is_not_held_against_it():
    d = Driver(prompts_per_step=1, group_size=1)
    d.start("a")
    node: Node = d.core.fleet.nodes["a"]
    d.now = 1.0
    d.tokens("p0@0#0", 1)
    d.now = 1.5
    d.tokens("p0@0#0", 1, 2)
    assert 2 * PRIOR_STEP_S < node.speed.step_s(1) < 0.25
    d.finish("p0@0#0")
    d.now = 100.0
    d.next_step()
    d.now = 101.0
    d.tokens("p1@0#0", 1)
    assert node.speed.step_s(1) < 0.3


def taught(seconds: Callable[[float], float], repeat: int = 6) -> Speed:
    """After rounds in which the batch shrinks."""
    speed = Speed()
    for _ in range(repeat):
        for batch in range(128, 0, -1):
            speed.observe(batch, seconds(batch))
    return speed


def test_error_falls_with_observations():
    speed = Speed()
    errors = [speed.error]
    for count in (1, 4, 40):
        for _ in range(count):
            speed.observe(16, 0.02)
        errors.append(speed.error)
    assert errors == sorted(errors, reverse=True)


def test_chunk_of_few_responses_and_the_next_of_all_count_as_one():
    speed, whole = Speed(), Speed()
    for _ in range(50):
        speed.observe(16, 0.1, steps=0.5)
        speed.observe(16, 0.1, steps=9.5)
        whole.observe(16, 0.2, steps=10.0)
    assert speed.step_s(16) == pytest.approx(whole.step_s(16), rel=0.05)


def test_node_that_joins_is_taken_to_be_like_the_others():
    others = [taught(lambda b, k=k: k * (0.01 + 0.0001 * b)) for k in (1, 3)]
    speed = Speed.like(others)
    assert speed.step_s(64) == pytest.approx(2 * 0.0164, rel=0.1)
    assert Speed.like([Speed()]).step_s(64) == Speed().step_s(64)
