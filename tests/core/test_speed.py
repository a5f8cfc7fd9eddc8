"""How fast a node decodes is learned from its chunks."""

import math
import random
from collections.abc import Callable, Iterable
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
        assert speed.step_s(batch) == pytest.approx(base + slope * batch, rel=0.1)
    assert speed.step_s(256) - speed.step_s(128) == pytest.approx(128 * slope, rel=0.25)


def test_one_batch_size_gives_the_speed_there_and_a_slope_that_is_neither_zero_nor_all():
    speed = Speed()
    for _ in range(100):
        speed.observe(64, 0.08)
    assert speed.step_s(64) == pytest.approx(0.08)
    slope = speed.step_s(128) - speed.step_s(127)
    assert 0 < slope < 0.08 / 64
    assert speed.step_s(1) > slope


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


@pytest.mark.parametrize("seed", range(20))
def test_estimate_does_not_run_away_when_chunks_come_late_and_then_together(seed: int):
    """On a machine that does much else: of a hundred observations a few are far off. The estimate
    is then rough, but no node seems a hundred times as slow as it is."""
    rng, speed = random.Random(seed), Speed()
    off: list[float] = []
    for k in range(300):
        batch = rng.choice((16, 16, 16, 15, 14, 12, 10, 8, 7, 4, 3, 1))
        seconds = (0.005 + 0.001 * batch) * rng.lognormvariate(0.0, 0.3)
        speed.observe(batch, seconds * rng.choices((1, 0.01, 6), (94, 3, 3))[0], 20 * batch)
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
    assert node.speed.step_s(1) == pytest.approx(0.25)
    d.finish("p0@0#0")
    d.now = 100.0
    d.next_step()
    d.now = 101.0
    d.tokens("p1@0#0", 1)
    assert node.speed.step_s(1) < 0.3


def test_slow_node_that_is_heard_twice_in_a_row_is_looked_at_and_one_odd_chunk_is_not_believed():
    speed = taught(lambda b: 0.02, batches=(8,))
    speed.observe(8, 0.2)
    assert speed.step_s(8) == pytest.approx(0.02, rel=0.35)
    speed = taught(lambda b: 0.02, batches=(8,))
    for _ in range(8):
        speed.observe(8, 0.08)
    assert speed.step_s(8) == pytest.approx(0.08, rel=0.2)


# What a step takes with so many responses.
SHAPES: dict[str, Callable[[float], float]] = {
    "knee": lambda b: 0.01 * max(1.0, b / 32),
    "slope": lambda b: 0.01 * (1 + b / 64),
    "cliff": lambda b: 0.01 * (1 + b / 500) * (3.0 if b > 48 else 1.0),
}
MAX_BATCH = 128


def taught(
    seconds: Callable[[float], float],
    batches: Iterable[int] = range(128, 0, -1),
    repeat: int = 40,
    noise: float = 0.0,
    each: float = 0.0,
    seed: int = 0,
) -> Speed:
    """After rounds in which the batch shrinks and contexts grow; `each`: of a token of context."""
    rng, speed = random.Random(seed), Speed()
    for _ in range(repeat):
        prompt = rng.uniform(100, 2000)
        for at, batch in enumerate(batches):
            context = batch * (prompt + 20 * at)
            took = seconds(batch) + each * context
            speed.observe(batch, took * rng.gauss(1.0, noise), float(context))
    return speed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_curve_is_learned_whatever_its_shape(shape: str, seed: int):
    seconds = SHAPES[shape]
    speed = taught(seconds, repeat=6, noise=0.05, seed=seed)
    for batch in (1, 3, 6, 12, 24, 92, 120):
        assert speed.step_s(batch) == pytest.approx(seconds(batch), rel=0.15)


def test_nodes_are_filled_up_to_the_cliff_and_no_farther():
    peaks = {name: taught(s, repeat=6).peak(MAX_BATCH) for name, s in SHAPES.items()}
    assert peaks["knee"] == peaks["slope"] == MAX_BATCH
    assert 24 <= peaks["cliff"] <= 64
    assert Speed().peak(MAX_BATCH) == MAX_BATCH
    d = Driver(prompts_per_step=90, group_size=1, slots=128)
    d.start("a")
    node = d.core.fleet.nodes["a"]
    assert len(node.running) == 90
    node.speed = taught(SHAPES["cliff"], repeat=6)
    d.finish_round()
    d.train(0)
    d.confirm("a", 1)
    assert len(node.running) == peaks["cliff"]
    assert len(d.core.table.queue) == 90 - peaks["cliff"]


def test_context_that_costs_nothing_is_not_charged_for_a_node_that_warms_up():
    speed = Speed()
    for at in range(100):
        speed.observe(8, 0.02 * (1 - 0.2 / (1 + at)), 8.0 * (200 + 32 * at))
    assert speed.step_s(8) == pytest.approx(0.02, rel=0.02)


def test_error_falls_with_what_was_seen_and_grows_with_the_distance_from_it():
    rng, speed = random.Random(0), Speed()
    errors = [speed.error(16)]
    for count in (1, 4, 40):
        for _ in range(count):
            speed.observe(16, 0.02 * rng.gauss(1.0, 0.05))
        errors.append(speed.error(16))
    assert errors == sorted(errors, reverse=True)
    assert speed.error(16) < 0.02 < speed.error(32) < speed.error(128)
    noisy = taught(lambda b: 0.02, batches=(16,), noise=0.3)
    assert noisy.error(16) > 2 * speed.error(16)


def test_node_that_turns_slow_is_slow_with_every_batch_also_those_not_seen_since():
    seconds = SHAPES["knee"]
    speed = taught(seconds, repeat=6)
    for _ in range(12):
        speed.observe(100, 4 * seconds(100), 100 * 1000.0)
    for batch in (4, 16, 100):
        assert speed.step_s(batch) == pytest.approx(4 * seconds(batch), rel=0.2)
    for _ in range(12):
        speed.observe(100, seconds(100), 100 * 1000.0)
    assert speed.step_s(4) == pytest.approx(seconds(4), rel=0.2)


def test_node_that_joins_is_taken_to_be_like_the_others():
    others = [taught(lambda b, k=k: k * (0.01 + 0.0001 * b), each=1e-8, noise=0.01) for k in (1, 3)]
    speed = Speed.like(others)
    assert speed.step_s(64) == pytest.approx(2 * 0.0164, rel=0.1)
    assert Speed.like([Speed()]).step_s(64) == Speed().step_s(64)
