"""Weights on their way in whole runs: who pulled from whom, how long it took, who died."""

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from lightrl.sim.inputs.hardware import SimTraining, SimTransfer
from lightrl.sim.inputs.scenario import Scenario
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.report import figures, tables
from scripts.studies.published_lib.synthetic import synthetic_trace
from tests.sim.conftest import SCENARIO, nodes, world
from tests.support.tiers import e2e

SIZE = 10e9
LINE = SimTransfer(
    num_bytes=SIZE, receiver_bytes_per_s=1e10, sender_bytes_per_s=1e10, load_s=0.3
)  # one node alone: a second
MANY = 20


def lines(**changes: Any) -> Scenario:
    return replace(SCENARIO, transfer=replace(LINE, **changes))


def num_bytes(out: SimOutcome, what: str = "num_bytes") -> float:
    """Of all pulls."""
    return sum(getattr(pull, what) for pull in out.pulls)


def longest_s(out: SimOutcome) -> float:
    return max(pull.seconds for pull in out.pulls)


@pytest.mark.parametrize("num", [8, *e2e([MANY])])
def test_a_fleet_takes_hardly_longer_than_one_node(num: int):
    out = world(lines(), fleet=nodes(num), num_steps=2).run()
    w = figures(out, lines()).weights
    assert w.pulls == 2 * num  # those who finish last need not wait for the last version
    # Of the first version those that joined first know only few of the others.
    assert w.longest_pull_s <= {8: 1.3, MANY: 2.2}[num]
    assert out.steps[0].weights_s <= 1.3 + 0.3
    assert w.trainer_versions <= 2
    assert w.from_peers > 0.7
    pulled = num_bytes(out)
    assert pulled == pytest.approx(w.pulls * SIZE, rel=0.01)
    assert out.trainer_bytes + num_bytes(out, "peer_bytes") >= pulled * 0.99


@pytest.mark.parametrize("num", [8, *e2e([MANY])])
def test_without_relays_each_pulls_from_the_trainer(num: int):
    out = world(lines(relays=False), fleet=nodes(num), num_steps=1).run()
    w = figures(out, lines()).weights
    assert w.pull_s == pytest.approx(num, rel=0.01)
    assert w.from_peers == 0
    assert out.steps[0].opened_at == pytest.approx(num + 0.3, rel=0.01)


def test_a_ninth_that_comes_half_way_disturbs_nobody():
    trace = (TraceEvent(0.5, "late", True),)
    w = world(lines(), fleet=nodes(8), trace=trace, num_steps=1)
    out = w.run()
    assert len(out.pulls) == 9
    assert longest_s(out) <= 1.5
    assert out.trainer_bytes <= 2 * SIZE


def test_one_that_dies_half_way_holds_nobody_up():
    fleet = nodes(7)
    trace = (TraceEvent(0.0, "dies", True), TraceEvent(0.5, "dies", False))
    out = world(lines(lost_after_s=0.1), fleet=fleet, trace=trace, num_steps=1).run()
    assert out.counters["nodes_lost"] == 1
    assert len(out.pulls) == 7
    assert longest_s(out) <= 1.7
    assert out.trainer_bytes <= 2 * SIZE


@pytest.mark.parametrize("seed", [*range(2), *e2e(range(2, 6))])
@pytest.mark.parametrize("num", [6, *e2e([MANY])])
def test_relays_that_die_in_the_middle_of_a_transfer_lose_nothing(num: int, seed: int):
    """Weights that take half of a step, on nodes of which one dies every other second."""
    trace = synthetic_trace(num, 400.0, up_s=2.0 * num, down_s=4.0, seed=seed)
    scenario = lines(receiver_bytes_per_s=5e9, sender_bytes_per_s=5e9, delta_ratio=0.1)
    run = world(scenario, fleet=nodes(1), trace=trace, check=num == 6, num_steps=6)
    out = run.run()
    c = out.counters
    assert c["nodes_lost"] >= 3
    assert num_bytes(out, "peer_bytes") > 0
    assert c["trained_responses"] == 6 * 8 * 4
    assert c["rollout_tokens"] == out.trained_tokens + c["aborted_tokens"]
    assert out == world(scenario, fleet=nodes(1), trace=trace, num_steps=6).run()


def test_a_difference_costs_its_share_and_late_nodes_pull_all():
    # In the middle of the second step.
    trace = (TraceEvent(10.0, "late", True),)
    whole = world(lines(), fleet=nodes(3), trace=trace, num_steps=3).run()
    scenario = lines(delta_ratio=0.02)
    out = world(scenario, fleet=nodes(3), trace=trace, num_steps=3).run()
    w = figures(out, scenario).weights
    assert w.pulls == len(whole.pulls)
    delta_bytes = num_bytes(out, "delta_bytes")
    deltas = delta_bytes / (0.02 * SIZE)
    assert deltas == pytest.approx(round(deltas), rel=1e-6)
    assert round(deltas) == w.pulls - 4  # all but the first one of each node
    assert num_bytes(out) == pytest.approx(4 * SIZE + delta_bytes, rel=0.01)
    assert out.steps[0].weights_s == pytest.approx(0.02 + 0.3, abs=0.01)
    assert whole.steps[0].weights_s == pytest.approx(1.0 + 0.3, abs=0.05)


def test_publishing_takes_its_time_and_the_trainer_does_nothing_else():
    at_once = world(lines(), num_steps=3).run()
    out = world(lines(publish_s=1.5), num_steps=3).run()
    assert out.device_times["trainer"]["publish"] == pytest.approx(3 * 1.5)
    assert sum(out.device_times["trainer"].values()) == pytest.approx(out.elapsed_s)
    assert out.elapsed_s == pytest.approx(at_once.elapsed_s + 3 * 1.5, rel=0.02)
    stale = world(lines(publish_s=1.5), num_steps=4, max_staleness=1).run()
    assert stale.device_times["trainer"]["publish"] == pytest.approx(4 * 1.5)


def test_rates_say_how_long_publishing_and_loading_take():
    """Two seconds and five."""
    slow = lines(publish_s=0.5, publish_bytes_per_s=SIZE / 1.5, load_s=1, load_bytes_per_s=SIZE / 4)
    out = world(slow, fleet=nodes(2), num_steps=3).run()
    assert out.device_times["trainer"]["publish"] == pytest.approx(3 * 2.0)
    # The first version is there from the beginning.
    assert out.steps[0].opened_at == pytest.approx(
        5.0 + fmean(p.seconds for p in out.pulls), rel=0.05
    )
    at_once = world(lines(), fleet=nodes(2), num_steps=3).run()
    more_s = 3 * 2.0 + 3 * (5.0 - 0.3)
    assert out.elapsed_s == pytest.approx(at_once.elapsed_s + more_s, rel=0.03)


@pytest.mark.parametrize("num", [2, *e2e([MANY])])
def test_on_the_trainers_machine_its_file_is_proved_and_nothing_is_pulled(num: int):
    there = SimTraining(token_s=2e-4, step_s=0.5, placement="colocated")
    scenario = replace(lines(file_bytes_per_s=SIZE / 2), training=there)
    out = world(scenario, fleet=nodes(num), num_steps=2).run()
    assert not out.pulls
    assert out.trainer_bytes == 0
    assert out.steps[0].opened_at == pytest.approx(2.0 + 0.3)


@pytest.mark.parametrize("num", [2, *e2e([MANY])])
def test_others_pull_over_the_trainers_line_and_not_over_those_of_its_machine(num: int):
    there = SimTraining(token_s=2e-4, step_s=0.5, placement="colocated")
    scenario = replace(lines(relays=False, receiver_bytes_per_s=4e10), training=there)
    spot = tuple(TraceEvent(0.0, f"s{k}", True) for k in range(2))
    out = world(scenario, fleet=nodes(num), trace=spot, num_steps=1).run()
    assert longest_s(out) == pytest.approx(2.0, rel=0.01)  # 20 GB at 10 GB/s
    transfer = replace(scenario.transfer, relays=True, file_bytes_per_s=math.inf)
    relayed = replace(scenario, transfer=transfer)
    out = world(relayed, fleet=nodes(num), trace=spot, num_steps=1).run()
    assert out.trainer_bytes >= SIZE * 0.99
    assert longest_s(out) >= 0.99


def test_a_version_that_overtakes_one_on_its_way_is_loaded_alone():
    scenario = lines(num_bytes=80e9)  # eight seconds, longer than a step
    out = world(scenario, fleet=nodes(3), num_steps=6, max_staleness=2).run()
    assert out.counters["trained_responses"] == 6 * 8 * 4
    assert len(out.pulls) < 3 * 7


def test_what_transfers_took_is_printed():
    scenario = lines(delta_ratio=0.5)
    out = world(scenario, fleet=nodes(3), num_steps=2, broadcast="auto").run()
    text = str(tables(figures(out, scenario))[-1])
    assert "weights    3 pulls, " in text
    assert "% of the bytes from peers, the trainer sent each version 0.7 times" in text
    assert "broadcast  to 3 nodes, 3 s each; 0 broken" in text
    nothing = figures(world(num_steps=1, scenario=lines(num_bytes=0.0)).run(), lines())
    assert "weights  " not in str(tables(nothing)[-1])
