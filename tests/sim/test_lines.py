"""Fair shares of bandwidth, by hand and by the definition."""

import math
import random
from time import process_time

import pytest

from lightrl.sim.weights.swarm import fair_rates
from tests.sim.buckets import Lines


def test_what_a_full_line_leaves_goes_to_who_can_use_it():
    flows = [("a", "x"), ("a", "y"), ("b", "y"), ("b", "z")]
    rates = fair_rates(flows, up={"a": 1.0, "b": 9.0}, down={"x": 9.0, "y": 2.0, "z": 3.0})
    assert rates == [0.5, 0.5, 1.5, 3.0]


def test_each_direction_of_a_line_is_its_own():
    flows = [("a", "b"), ("b", "a")]
    assert fair_rates(flows, {"a": 3.0, "b": 2.0}, {"a": 4.0, "b": 5.0}) == [3.0, 2.0]


@pytest.mark.parametrize("seed", range(20))
def test_no_flow_can_get_more_without_taking_from_a_poorer_one(seed: int):
    """The definition: each flow has a full line on which no other has more than it."""
    rng = random.Random(seed)
    names = [f"n{k}" for k in range(rng.randint(2, 9))]
    up = {n: rng.choice([1.0, 2.0, 8.0, rng.random()]) for n in names}
    down = {n: rng.choice([1.0, 2.0, 8.0, rng.random()]) for n in names}
    pairs = [(a, b) for a in names for b in names if a != b]
    flows = rng.choices(pairs, k=rng.randint(1, 30))
    rates = fair_rates(flows, up, down)
    for end, capacity in ((0, up), (1, down)):
        for n in names:
            assert sum(r for f, r in zip(flows, rates, strict=True) if f[end] == n) <= (
                capacity[n] * (1 + 1e-9)
            )

    def is_full(end: int, flow: tuple[str, str], rate: float) -> bool:
        mine = [r for f, r in zip(flows, rates, strict=True) if f[end] == flow[end]]
        capacity = (up if end == 0 else down)[flow[end]]
        return sum(mine) >= capacity * (1 - 1e-9) and max(mine) <= rate * (1 + 1e-9)

    for flow, rate in zip(flows, rates, strict=True):
        assert is_full(0, flow, rate) or is_full(1, flow, rate)


def test_flows_end_one_after_the_other():
    lines: Lines[str] = Lines()
    lines.add_node("a", 2.0, math.inf)
    for name in "xy":
        lines.add_node(name, math.inf, 10.0)
    lines.open("long", ("a", "x"), 30.0)
    lines.open("short", ("a", "y"), 10.0)
    assert lines.next_at() == 10.0
    assert lines.advance(10.0) == ["short"]
    lines.close("short")
    assert lines.next_at() == 20.0  # 20 bytes are left, at 2 a second
    assert lines.advance(15.0) == []
    lines.open("again", ("a", "y"), 5.0)
    assert lines.next_at() == 20.0
    assert lines.advance(20.0) == ["again"]
    lines.go_on("again", 1.0)
    assert lines.next_at() == 21.0


def test_late_clocks_do_not_stand_still():
    lines: Lines[int] = Lines()
    lines.add_node("a", 3e9, math.inf)
    lines.add_node("b", 1.0, 3e9)
    lines.advance(1e8 / 3)
    for num_bytes in (1e9 / 3, 1e3 / 7, 1.0):
        lines.open(0, ("a", "b"), num_bytes)
        for _ in range(3):
            if lines.advance(lines.next_at()):
                break
        else:
            pytest.fail("never through")


def test_a_thousand_nodes_of_five_flows_are_shared_quickly():
    rng = random.Random(0)
    names = [f"n{k}" for k in range(1000)]
    rates = {n: rng.uniform(1, 2) for n in names}
    flows = [(rng.choice(names), n) for n in names for _ in range(5)]
    began = process_time()
    fair_rates(flows, rates, rates)
    assert process_time() - began < 0.5


def test_a_flow_through_several_nodes_has_one_rate_on_all_their_lines():
    flows = [("a", "x", "y", "z"), ("a", "z"), ("x", "q")]
    up = {"a": 4.0, "x": 3.0, "y": 9.0}
    down = dict.fromkeys("xyzq", 9.0)
    assert fair_rates(flows, up, down) == [1.5, 2.5, 1.5]
