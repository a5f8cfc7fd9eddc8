"""Whole runs in virtual time, on the core that also drives real ones."""

from dataclasses import replace
from time import process_time

import pytest

from lightrl.core.settings import Tail
from lightrl.errors import SimError
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.scenario import Scenario, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import RewardClass, RewardTimes
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.report import figures
from scripts.studies.published_lib.synthetic import synthetic_trace
from tests.sim.conftest import COLOCATED, LIMIT, SCENARIO, nodes, world

BOTH = Tail(1.25, 1.25)
PROMPTS = Tail(1.25, 1.0)
CONTINUE = Tail(1.25, 1.0, deferred="continue")
TIGHT = replace(
    COLOCATED, engines={k: replace(e, kv_tokens=400) for k, e in COLOCATED.engines.items()}
)
SPOT = synthetic_trace(6, 400.0, up_s=12.0, down_s=6.0, seed=5)
SYNCHRONOUS = Switches(streaming=False, async_rewards=False)

VARIANTS: dict[str, tuple[Scenario, Switches, Tail]] = {
    "plain": (SCENARIO, Switches(), Tail()),
    "synchronous": (SCENARIO, SYNCHRONOUS, Tail()),
    "tail": (SCENARIO, Switches(), BOTH),
    "clock": (SCENARIO, Switches(), Tail(1.25, 1.25, race="clock", fresh_noise=True)),
    "speculation": (SCENARIO, Switches(speculation=True), PROMPTS),
    "colocated": (COLOCATED, SYNCHRONOUS, BOTH),
    "stream trainer": (COLOCATED, Switches(offload="window"), BOTH),
    "planner": (TIGHT, Switches(planner=True), BOTH),
}
CHECKED = ("tail", "clock", "stream trainer", "planner")  # after every event; that takes its time


def step_s(outcome: SimOutcome) -> float:
    return figures(outcome, SCENARIO).step_s


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_lost_and_no_bound_is_beaten(name: str):
    scenario, switches, tail = VARIANTS[name]
    w = world(scenario, switches, tail=tail, check=name in CHECKED, num_steps=5)
    out = w.run()
    c = out.counters
    assert len(out.steps) == 5
    assert c["trained_responses"] == 5 * 8 * 4
    assert c["rollout_tokens"] == out.trained_tokens + c["aborted_tokens"]
    assert out.sampled_tokens >= c["rollout_tokens"]  # the rest was given up before it was sent
    assert c["holes"] == c["bad_chunks"] == c["nodes_lost"] == 0
    for kind, times in out.device_times.items():
        assert min(times.values()) > -1e-9
        assert sum(times.values()) == pytest.approx(out.device_s[kind])
    for step in out.steps:
        assert step.step_s >= step.bound_s * (1 - 1e-9)
    assert sum(s.step_s for s in out.steps) == pytest.approx(out.elapsed_s - out.steps[0].opened_at)


def test_the_same_seed_gives_the_same_and_another_one_does_not():
    runs = [world(tail=BOTH, trace=SPOT, run_seed=s).run() for s in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].steps != runs[2].steps


@pytest.mark.parametrize("tail", [PROMPTS, BOTH], ids=["prompts", "both"])
def test_who_wins_a_race_in_tokens_depends_on_nothing_but_the_samples(tail: Tail):
    one = world(tail=tail, foresight=False).run()
    coarse = world(tail=tail, foresight=False, switches=Switches(chunk_tokens=200)).run()
    spot = world(tail=tail, foresight=False, fleet=nodes(1, slowness=3.0), trace=SPOT).run()
    assert one.winners == coarse.winners == spot.winners
    assert spot.counters["nodes_lost"] > 0
    assert step_s(spot) > step_s(one)


def test_a_fleet_that_comes_and_goes_finishes_the_run():
    trace = synthetic_trace(6, 400.0, up_s=12.0, down_s=6.0, seed=7)
    fleet = nodes(1, slowness=1.5)  # what runs there moves to who comes
    out = world(fleet=fleet, trace=trace, tail=BOTH, check=True, num_steps=6, chunk_tokens=1).run()
    c = out.counters
    assert c["nodes_lost"] >= 5
    assert c["responses_moved"] > c["migrations"] > 0
    assert c["trained_responses"] == 6 * 8 * 4
    assert c["rollout_tokens"] == out.trained_tokens + c["aborted_tokens"]
    assert out.sampled_tokens > c["rollout_tokens"]
    assert set(out.device_s) == {"rollout", "spot", "trainer"}
    for kind, times in out.device_times.items():
        assert sum(times.values()) == pytest.approx(out.device_s[kind])


def test_without_token_collection_lost_responses_start_again():
    trace = tuple(
        TraceEvent(t, n, a) for t, n, a in [(0, "s0", True), (0, "s1", True), (3.5, "s1", False)]
    )
    lost = {}
    for collected in (True, False):
        switches = Switches(token_collection=collected, chunk_tokens=4)
        out = world(fleet=[], trace=trace, num_steps=1, switches=switches).run()
        lost[collected] = out.sampled_tokens - out.trained_tokens
        assert out.counters["trained_responses"] == 32
    assert 0 < lost[True] <= 4 * 8 < 200 < lost[False]


def test_an_engine_that_starts_late_does_not_join_a_machine_that_is_gone():
    slow = replace(SCENARIO, transfer=replace(SCENARIO.transfer, start_s=5.0))
    trace = (TraceEvent(0, "a", True), TraceEvent(1, "b", True), TraceEvent(3, "b", False))
    out = world(slow, fleet=[], trace=trace, num_steps=1).run()
    assert out.steps[0].opened_at == pytest.approx(5.0 + 1e9 / 6.25e9 + 0.3)
    assert out.steps[0].nodes <= 1.0
    assert out.counters["nodes_lost"] == 0


def test_a_fleet_that_is_gone_for_good_is_said():
    with pytest.raises(SimError, match="is stuck at step 0 of 4"):
        world(fleet=[], trace=(TraceEvent(0, "a", True), TraceEvent(2, "a", False))).run()
    with pytest.raises(SimError, match="needs nodes"):
        world(fleet=[])
    with pytest.raises(SimError, match="40 prompts, fewer than the 50"):
        world(prompts_per_step=50)


def test_steps_that_overlap_hide_the_tail_of_each():
    plain = world(SCENARIO, num_steps=6).run()
    stale = world(SCENARIO, num_steps=6, max_staleness=1).run()
    assert step_s(stale) < 0.9 * step_s(plain)
    assert stale.counters["rollout_tokens"] == stale.trained_tokens
    for step in stale.steps:
        assert stale.elapsed_s >= step.training_s


def test_each_mechanism_is_worth_something():
    reward = RewardTimes((RewardClass(constant_s=1.0, workers=8),))
    slow = replace(SCENARIO, workload=replace(SCENARIO.workload, reward=reward))
    base = step_s(world(slow, SYNCHRONOUS, migration=False).run())
    assert (
        step_s(world(slow, replace(SYNCHRONOUS, async_rewards=True), migration=False).run())
        < base - 0.5
    )
    assert step_s(world(slow, migration=False).run()) < base - 1.0
    assert (
        step_s(world(slow, replace(SYNCHRONOUS, speculation=True), migration=False).run())
        < 0.9 * base
    )
    assert step_s(world(slow, SYNCHRONOUS, migration=False, tail=BOTH, num_steps=5).run()) < base


def test_the_bias_of_racing_is_told():
    rows = {
        name: world(tail=tail, num_steps=10, num_prompts=40).run()
        for name, tail in {"off": Tail(), "prompts": CONTINUE, "both": BOTH}.items()
    }
    bias = {name: figures(out, SCENARIO).length_bias for name, out in rows.items()}
    assert bias["off"] == bias["prompts"] == 0.0
    assert bias["both"] < -0.1
    workload = replace(SCENARIO.workload, same_again=0.0, num_prompts=320)
    fresh = replace(SCENARIO, workload=workload)
    out = world(fresh, tail=PROMPTS, num_steps=10, prompts_per_step=32, fleet=nodes(8)).run()
    assert -0.35 < figures(out, SCENARIO).length_bias < -0.03  # the longest are drawn once more


def test_released_nodes_train_while_others_go_on():
    without = world(COLOCATED, Switches(), num_steps=3).run()
    released = world(COLOCATED, Switches(offload="window"), num_steps=3).run()
    assert released.counters["responses_moved"] > without.counters["responses_moved"]
    assert max(s.train_s for s in released.steps) < min(s.train_s for s in without.steps)


def test_the_planner_answers_preemptions_with_more_parallelism():
    out = world(TIGHT, Switches(planner=True), num_steps=4, migration=False).run()
    assert [s.parallelism for s in out.steps][:2] == [1, 2]
    assert out.steps[0].preemptions > 0
    assert out.device_s["rollout"] == pytest.approx(4 * out.elapsed_s)


def test_small_caches_preempt_and_slow_nodes_are_slow():
    engine = EngineProfile(context_s=1e-6)
    tight = replace(SCENARIO, engines={1: replace(engine, kv_tokens=400)})
    assert world(tight, num_steps=1).run().preemptions > 0
    slow = world(fleet=nodes(4, slowness=2.0), num_steps=2).run()
    assert step_s(slow) > 1.5 * step_s(world(num_steps=2).run())


@pytest.mark.e2e
def test_a_large_fleet_is_simulated_quickly():
    """A tenth of 10,000 responses on 1,000 nodes; CPU time, for the machine may be busy."""
    lengths = replace(SCENARIO.workload, lengths=SCENARIO.workload.lengths, num_prompts=1000)
    began = process_time()
    out = world(
        replace(SCENARIO, workload=lengths),
        fleet=nodes(100, slots=32),
        prompts_per_step=125,
        group_size=8,
        num_steps=1,
        num_prompts=1000,
    ).run()
    assert out.kept.total() == 1000
    assert out.kept[LIMIT] > 0
    assert out.steps[0].longest_tokens == LIMIT
    assert process_time() - began < 4.0
