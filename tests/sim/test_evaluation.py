"""In virtual time: three sets at once take about as long as their tokens do, and none waits for the
longest responses of another."""

from dataclasses import replace

from lightrl.core.settings import EvalSet
from lightrl.core.state import Round
from lightrl.messages.responses import Sampling
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.workload import LengthModel
from scripts.bench.evaluation_lib.ideal import Fleet, bound_s, even_s, oracle_s, play_s
from scripts.bench.evaluation_lib.virtual import Watch, evaluations
from tests.sim.conftest import SCENARIO, nodes, world

SETS = (
    EvalSet("long", 6, 8, Sampling(0.6), 600),
    EvalSet("middle", 60, 2, Sampling(0.6), 200),
    EvalSet("easy", 150, 1, Sampling(0.0), 80),
)
STEP_S, SLOTS, NODES = 0.01, 16, 4
# a step takes as long however many take part in it
FLAT = EngineProfile(STEP_S, half_batch=1e9, context_s=0.0, prefill_s=0.0)


def evaluated(*sets: EvalSet) -> list[Round]:
    """Before the first of three steps and after each."""
    scenario = replace(SCENARIO, engines={1: FLAT})
    w = world(scenario, fleet=nodes(NODES, SLOTS), eval_interval=1, eval_sets=sets, num_steps=3)
    watch = Watch(w)
    w.run()
    return watch.rounds


def ideal_s(round: Round) -> float:
    lengths = [len(r.tokens) for g in round.groups.values() for r in g.responses]
    return STEP_S * max(sum(lengths) / (NODES * SLOTS), *lengths)


def seconds(round: Round) -> float:
    return round.closed_at - round.opened_at


def test_three_sets_at_once_take_little_more_than_the_ideal_and_less_than_one_by_one():
    together = evaluated(*SETS)
    apart = [evaluated(one) for one in SETS]
    assert [round.step for round in together] == [0, 1, 2, 3]
    for k, round in enumerate(together):
        assert len(round.groups) == sum(one.num_prompts for one in SETS)
        assert {r.finish_reason for g in round.groups.values() for r in g.responses} <= {
            "stop",
            "length",
        }
        ratio = seconds(round) / ideal_s(round)
        one_by_one = sum(seconds(run[k]) for run in apart) / ideal_s(round)
        assert ratio <= 1.1, (k, ratio)
        assert one_by_one > 1.2 * ratio


def test_the_benchmark_of_evaluations_runs():
    taken = evaluations((EvalSet("s", 4, 2, Sampling(1.0), 50),), 1, 4, 1)
    assert [len(lengths) for _, lengths in taken] == [8, 8]


def test_nothing_that_knows_all_lengths_is_faster_than_the_bound():
    fleets = [
        Fleet(n, slots, 0.01, half) for n in (1, 2, 4) for slots in (2, 8) for half in (4, 99)
    ]
    for seed in range(5):
        shape = LengthModel(seed=seed).scaled(400)
        lengths = [shape.length("p", 0, k, 400) for k in range(60)]
        for fleet in fleets:
            least = bound_s(lengths, fleet)
            plays = [play_s(lengths, fleet, [fleet.slots] * fleet.nodes)]
            plays += [play_s(lengths, fleet, [b] * fleet.nodes) for b in range(1, fleet.slots)]
            assert least <= min(oracle_s(lengths, fleet), *plays) * (1 + 1e-3)


def test_ideals_of_cases_computed_by_hand():
    fleet = Fleet(2, 2, 1.0, 10.0)
    assert even_s([10] * 4, fleet) == play_s([10] * 4, fleet, [2, 2]) == 10 * 1.2
    assert round(bound_s([10] * 4, fleet), 2) == 12.0  # all slots are needed all the time
    assert round(bound_s([10], fleet), 2) == 11.0  # alone
    # two nodes: one of 10 alone beside ten of 1, two at once, on the other
    assert play_s([10, *[1] * 10], fleet, [1, 2]) == 11.0
