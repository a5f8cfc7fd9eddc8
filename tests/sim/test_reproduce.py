"""Published figures, on a few rounds each; the whole of it is scripts/studies/published."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from lightrl.core.settings import Tail
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import FITTED_8K, RewardClass, RewardTimes
from lightrl.sim.world import World
from scripts.studies.published_lib.instances import checks_extra, checks_of
from scripts.studies.published_lib.published import (
    ENGINES,
    ETA,
    RESERVED_ENGINES,
    RLBOOST,
    STUDIES,
)
from scripts.studies.published_lib.report import as_json, tables
from scripts.studies.published_lib.reproduce import Baseline, Reproduction, simulate
from scripts.studies.published_lib.simulated import Check, Setting, Simulated
from scripts.studies.published_lib.surplus import Surplus
from scripts.studies.published_lib.systems import (
    INSTANCES,
    MOVING,
    STARTING_AGAIN,
    extra,
    systems,
    with_instances,
)
from tests.sim.conftest import COLOCATED, nodes, world
from tests.sim.test_world import BOTH, SYNCHRONOUS

PERIOD = "ssssl"  # four short rounds, one long

SHORT_STUDY = STUDIES[0]
BARS = {b.name: b for b in SHORT_STUDY.bars}
NO_RACE, RACE = "prompts x 1, responses x 1", "prompts x 1.25, responses x 1.25"


def test_rounds_without_a_race_take_as_long_as_published():
    row = replace(systems(SHORT_STUDY.bars)[NO_RACE], rounds=2)
    rounds = simulate(Setting(SHORT_STUDY.workload, row, seed=0)).figures.kinds["plain"]
    assert rounds.rollout_s == pytest.approx(BARS[NO_RACE].rollout_s, rel=0.15)


def test_tail_batching_has_its_period_and_its_gain():
    row = replace(systems(SHORT_STUDY.bars)[RACE], rounds=len(PERIOD))
    simulated = simulate(Setting(SHORT_STUDY.workload, row, seed=0))
    assert simulated.kinds == PERIOD
    kinds = simulated.figures.kinds
    mean_s = fmean([kinds["short"].rollout_s] * 4 + [kinds["long"].rollout_s])
    assert mean_s == pytest.approx(BARS[RACE].rollout_s, rel=0.15)
    assert simulated.figures.length_bias < -0.15


def test_every_row_has_whole_periods():
    for study in STUDIES:
        for bar in study.bars:
            if bar.eta_prompts > 1:
                period = 1 + round(1 / (bar.eta_prompts - 1))
                assert systems(study.bars)[bar.name].rounds % period == 0
    assert BARS[RACE].eta_prompts == ETA


def test_the_devices_of_rlboost_alone_sample_for_most_of_a_step():
    """Up to 73 % of it, the paper says."""
    row = replace(with_instances()["colocated"], rounds=1)
    simulated = simulate(Setting(RLBOOST.workload, row, seed=0)).figures
    step = simulated.kinds["plain"]
    assert row.engines == RESERVED_ENGINES
    assert 0.5 < step.rollout_s / simulated.step_s < 0.73
    hourly = simulated.cost_per_step / (simulated.step_s / 3600)
    assert hourly == pytest.approx(83.79, rel=0.02)


def test_preemptible_instances_that_stay_take_part_of_the_work():
    rows = with_instances()
    alone, few = (
        simulate(Setting(RLBOOST.workload, replace(rows[name], rounds=1), seed=0)).figures
        for name in ("colocated", "+ 4 preemptible")
    )
    assert few.devices["spot"]["decode"] > 0.3
    assert few.responses_moved > 0
    assert 0.5 * alone.step_s < few.step_s < 0.9 * alone.step_s
    hourly = few.cost_per_step / (few.step_s / 3600)
    assert hourly == pytest.approx(83.79 + 4 * 5.32, rel=0.02)


def test_devices_of_all_rows_of_ours_change_sides_by_the_rule_of_the_core():
    ours = [row for row in systems(SHORT_STUDY.bars).values() if row.foresight]
    assert len(ours) == 5
    for row in ours:
        assert row.engines == ENGINES
        assert row.switches.offload == "foreseen"
    simulated = simulate(Setting(SHORT_STUDY.workload, replace(ours[2], rounds=2), seed=0)).figures
    assert simulated.devices["rollout"]["train"] > 0
    assert "trainer" not in simulated.devices


def test_what_is_told_of_instances_follows_from_the_rows():
    row = replace(with_instances()["5120 tokens: colocated"], rounds=1, learns=False)
    one = simulate(Setting(RLBOOST.workload, row, seed=0))

    def found(step_s: dict[str, float], cost_per_s: float = 1.0) -> dict[str, list[Simulated]]:
        return {
            name: [replace(one, figures=replace(one.figures, step_s=s), cost_per_s=cost_per_s)]
            for name, s in step_s.items()
        }

    rows = found({"colocated": 100.0, "+ 1 preemptible": 80.0, "+ 2 preemptible": 50.0})
    found_checks = {c.name: c.ours for c in checks_of(RLBOOST, rows)}
    assert found_checks == {
        "+ 1 preemptible: speed-up": 1.25,
        "+ 1 preemptible: cost of a token": 0.8,
    }
    rows = found({"changing: with memory": 50.0, "changing: without memory": 60.0})
    rows |= found({f"5120 tokens: + {n} preemptible": abs(n - 4) + 2.0 for n in INSTANCES})
    found_checks = {c.name: c.ours for c in checks_of(RLBOOST, rows)}
    assert found_checks == {"throughput with memory": 1.2, "limit of 5120: best number": 4}
    lost = {"+ 6 preemptible": 50.0, MOVING: 60.0, STARTING_AGAIN: 90.0}
    assert [c.ours for c in checks_of(RLBOOST, found(lost))] == [0.75]
    rows = found({"colocated": 100.0, "RLBoost": 60.0, "LightRL, prompts": 50.0})
    assert [round(c.ours, 9) for c in checks_extra(rows)] == [1.2, 2.0]


def test_every_mechanism_is_there_alone_and_last():
    names = set(extra())
    alone = {name[2:] for name in names if name.startswith("+ ")}
    last = {name[2:] for name in names if name.startswith("- ")}
    assert last == alone - {"race of prompts"}  # without that it is "LightRL, off"
    traces = {row.trace for name, row in extra().items() if name != "colocated"}
    assert len(traces) == 1


def test_surplus_that_runs_on_is_scored_too():
    reward = RewardTimes((RewardClass(constant_s=1.0, workers=8),))
    scenario = replace(COLOCATED, workload=replace(COLOCATED.workload, reward=reward))
    clock = Tail(1.25, 1.5, race="clock")
    late = replace(SYNCHRONOUS, prompt_batch=1 << 30)
    ends = world(scenario, late, tail=clock, num_steps=3).run()
    w = world(scenario, late, tail=clock, num_steps=3, check=True)
    Surplus(w)
    goes_on = w.run()
    assert goes_on.sampled_tokens > ends.sampled_tokens
    assert fmean(s.train_s for s in goes_on.steps) > 0.5 + fmean(s.train_s for s in ends.steps)


def test_spot_nodes_sample_while_all_others_train():
    trace = (TraceEvent(0.0, "s0", True), TraceEvent(0.0, "s1", True))
    switches = replace(SYNCHRONOUS, async_rewards=True, streaming=True, offload="window")
    w: World = world(
        COLOCATED, switches, fleet=nodes(2), trace=trace, tail=BOTH, check=True, num_steps=3
    )
    out = w.run()
    assert out.device_times["rollout"]["train"] > 0
    assert "train" not in out.device_times["spot"]
    assert all(s.nodes == pytest.approx(2 * s.training_nodes) for s in out.steps[1:])


def test_luck_is_shared_by_what_is_sampled_together_and_drawn_anew_by_a_retry():
    def limits(group: str) -> int:
        lengths = [
            FITTED_8K.length(f"p{p}", 0, n, 8192, group.format(p))
            for p in range(60)
            for n in range(8)
        ]
        return sum(n > 4000 for n in lengths)

    def of_one(group: str) -> list[int]:
        return [FITTED_8K.length("p0", 0, n, 8192, group) for n in range(8)]

    assert of_one("p0@0") == of_one("p0@0")
    assert {tuple(of_one(f"p0@0'{k}")) for k in range(20)} != {tuple(of_one("p0@0"))}
    assert 10 < limits("{}@0") < 90


def test_what_is_printed():
    baseline = Baseline("LightRL full", 61.2, 3.1, 0.5, 900.0, 1000.0, 0.01, 0.02, 0.25, 2.5)
    result = Reproduction("w", [Check("a bar: rollout s", 100.0, 90.0)], PERIOD, [baseline])
    tree: Any = as_json([result])["w"]
    assert tree["checks"][0]["error"] == pytest.approx(-0.1)
    assert tree["systems"][0]["bias"] == pytest.approx(-0.1)
    assert any("-10.0 %: a bar" in str(part) for part in tables(result))
