"""What RLBoost's rows add to the simulator: windows that settle, instances that die or start."""

import math
from dataclasses import replace
from statistics import fmean

import pytest

from lightrl.core.sharing.sharing_rules import StepTimes, View, WindowRule
from lightrl.core.state import Node
from lightrl.sim.inputs.scenario import Scenario, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.world import World
from scripts.studies.published_lib.losses import Losses
from scripts.studies.published_lib.rules import Held, NoWindow, Settled
from tests.sim.conftest import COLOCATED, nodes, world

SHARED = Switches(offload="window")
ALWAYS = tuple(TraceEvent(0.0, f"s{k}", True) for k in range(4))
TRAINS = replace(
    COLOCATED,
    training=replace(COLOCATED.training, token_s=8e-4),
    transfer=replace(COLOCATED.transfer, file_bytes_per_s=math.inf),
)


def view(opened_at: float) -> View:
    reserved, other = (Node(name, 1, ("rollout",), 8, 0.0, 1, "h") for name in ("n0", "s0"))
    return View("plain", opened_at, 0.0, [reserved], [other], [], 1.0, 0.0, 0.0, [1.0])


def step(waited_s: float) -> StepTimes:
    return StepTimes("plain", 1.0, 1, 100.0, waited_s, 0.0)


def test_a_window_that_is_held_ends_when_it_should():
    rule = Held(70.0)
    assert rule.decide(view(500.0), 510.0).look_at == pytest.approx(570.0)
    assert rule.decide(view(500.0), 570.0).release == ("n0",)


def test_a_settled_window_is_the_mean_of_what_was_learned():
    rule, same = Settled(steps=3), WindowRule()
    learned: list[float] = []
    for k, waited_s in enumerate((0.0, 30.0, 60.0)):
        for r in (rule, same):
            r.decide(view(1000.0 * k), 1000.0 * k)
            r.learn(step(waited_s))
        learned += same.memory().seeds.values()
    rule.learn(step(900.0))
    held = rule.decide(view(5000.0), 5000.0).look_at
    assert held == pytest.approx(5000.0 + fmean(learned))


def test_without_a_window_devices_leave_as_soon_as_others_are_there():
    assert NoWindow().decide(view(0.0), 0.0).release == ("n0",)
    assert not NoWindow().decide(replace(view(0.0), others=[]), 0.0).release


def run(lost: int, switches: Switches = SHARED) -> World:
    w = world(TRAINS, switches, fleet=nodes(2), trace=ALWAYS, check=True, num_steps=10)
    if lost:
        Losses(w, lost, at_s=3.0, first_step=2)
    w.run()
    return w


def test_nodes_die_in_each_step_and_are_there_again_in_the_next():
    whole, moving = run(0).outcome, run(2).outcome
    again = run(2, replace(SHARED, token_collection=False)).outcome
    assert whole.counters["nodes_lost"] == 0
    assert moving.counters["nodes_lost"] == again.counters["nodes_lost"] == 16
    for out in (moving, again):
        assert out.counters["trained_responses"] == 10 * 8 * 4
    steps = [[s.step_s for s in out.steps[2:]] for out in (whole, moving, again)]
    assert sum(steps[0]) < sum(steps[1]) < sum(steps[2])
    # that they start again is paid for by the tokens that they had
    assert again.sampled_tokens > again.trained_tokens + moving.sampled_tokens - (
        moving.trained_tokens
    )


def test_a_node_that_comes_takes_its_time_to_start_and_is_paid_for_it():
    slow = replace(TRAINS, transfer=replace(TRAINS.transfer, start_s=7.0))

    def spot(scenario: Scenario) -> tuple[float, float]:
        trace = (TraceEvent(0.0, "s0", True), TraceEvent(2.0, "s1", True))
        out = world(scenario, SHARED, fleet=nodes(2), trace=trace, num_steps=2).run()
        times = out.device_times["spot"]
        assert sum(times.values()) == pytest.approx(out.device_s["spot"])
        return times.get("start", 0.0), out.device_s["spot"] - 2 * out.elapsed_s

    assert spot(TRAINS) == (0.0, pytest.approx(-2.0))
    assert spot(slow) == (14.0, pytest.approx(-2.0))


def test_spot_nodes_may_have_room_for_more():
    w = world(replace(TRAINS, spot_kv_tokens=777), SHARED, fleet=nodes(1), trace=ALWAYS[:1])
    kv_tokens = {m.spec.name: m.engine.profile.kv_tokens for m in w.machines.values()}
    assert kv_tokens == {"n0": 0, "s0": 777}
