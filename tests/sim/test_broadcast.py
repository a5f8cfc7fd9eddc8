"""Broadcasts in whole runs: who gets a version so, when it pays, who dies in the middle."""

import random
from dataclasses import replace
from typing import Any

import pytest

from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.report import figures
from lightrl.sim.world import World
from scripts.studies.published_lib.synthetic import synthetic_trace
from tests.sim.conftest import COLOCATED, nodes, world
from tests.sim.test_transfers import LINE, MANY, SIZE, lines, num_bytes
from tests.support.tiers import e2e

FORM_S = 0.5
SEND_S = 1.0  # on these lines
RESPONSES = 8 * 4  # of a step


def broadcast(
    num: int = 4,
    trace: tuple[TraceEvent, ...] = (),
    transfer: dict[str, float] | None = None,
    **changes: Any,
) -> World:
    scenario = lines(**{"form_s": FORM_S, **(transfer or {})})
    settings = {"broadcast": "auto", "num_steps": 3, "check": True, **changes}
    return world(scenario, fleet=nodes(num), trace=trace, **settings)


def published_at(num: int, version: int) -> float:
    """Where nobody is lost: a group forms once, for the first version after that at the start."""
    forms = FORM_S if version == 1 else 0.0
    return broadcast(num).run().steps[version].opened_at - forms - SEND_S


@pytest.mark.parametrize("num", [4, *e2e([MANY])])
def test_it_is_sooner_than_a_pull_over_the_same_lines(num: int):
    by_broadcast, by_pull = broadcast(num).run(), broadcast(num, broadcast="off").run()
    assert len(by_broadcast.broadcasts_s) == num * 2  # all but the first and the last version
    assert len(by_broadcast.pulls) == num
    assert by_broadcast.counters["trained_responses"] == 3 * RESPONSES
    seconds = {
        name: [step.weights_s for step in out.steps[:2]]
        for name, out in (("broadcast", by_broadcast), ("pull", by_pull))
    }
    first, later = seconds["broadcast"]
    assert first == pytest.approx(FORM_S + SEND_S, rel=0.01)
    assert later == pytest.approx(SEND_S, rel=0.01)
    assert later < min(seconds["pull"]) - 0.9 * LINE.load_s


def test_bytes_on_the_lines():
    """The trainer's line carries each version about once, whatever the number of members."""
    run = broadcast(8)
    out = run.run()
    assert num_bytes(out) == pytest.approx(8 * SIZE, rel=0.01)  # pulled
    assert len(out.broadcasts_s) == 8 * 2
    off = broadcast(8, broadcast="off", num_steps=1).run()
    assert out.trainer_bytes == pytest.approx(off.trainer_bytes + 2 * SIZE)


def test_who_may_be_taken_away_pulls_and_who_joins_pulls_once():
    at = published_at(3, 1) + FORM_S + SEND_S / 2
    trace = (TraceEvent(0.0, "spot", True), TraceEvent(at, "late", True))
    run = broadcast(3, trace)
    out = run.run()
    assert out.counters["nodes_lost"] == 0
    assert out.num_broken == 0
    assert len(out.broadcasts_s) == 3 * 2
    # spot nodes: the one of the start has three versions to pull, the one that comes the newer two
    assert len(out.pulls) == 3 + 3 + 2
    w = figures(out, run.scenario).weights
    # a pull takes its share of the trainer's line, so the others get theirs later
    assert SEND_S < w.broadcast_s < 2.1 * SEND_S


def test_a_node_that_joins_is_a_member_from_the_next_version_on():
    """A reserved one: that comes by the trace, but has been in the fleet before."""
    at = published_at(3, 1) + FORM_S + SEND_S / 2
    trace = (TraceEvent(5.0, "n2", False), TraceEvent(at, "n2", True))
    out = broadcast(3, trace, num_steps=4).run()
    assert out.counters["nodes_lost"] == 1
    assert out.num_broken == 0
    assert len(out.broadcasts_s) == 2 + 3 + 3
    assert len(out.pulls) == 3 + 1


@pytest.mark.parametrize("after", [FORM_S / 2, FORM_S + SEND_S / 2, FORM_S + SEND_S + 0.5])
@pytest.mark.parametrize("num", [3, *e2e([MANY])])
def test_who_dies_in_the_middle_leaves_the_others_to_pull(num: int, after: float):
    """While it forms, sends or proves."""
    slow = {"prove_bytes_per_s": SIZE / 2}
    undisturbed = broadcast(num, transfer=slow).run()
    assert sum(undisturbed.broadcasts_s) == pytest.approx((2.0 * 2 + FORM_S) * num, rel=0.01)
    at = published_at(num, 1) + after
    out = broadcast(num, (TraceEvent(at, "n1", False),), slow).run()
    assert out.counters["nodes_lost"] == 1
    assert out.num_broken == 1
    # the survivors pull that version, all of it, and are a group again for the next one
    assert len(out.pulls) == num + (num - 1)
    assert len(out.broadcasts_s) == num - 1
    assert num_bytes(out) == pytest.approx(len(out.pulls) * SIZE, rel=0.01)
    assert out.counters["trained_responses"] == 3 * RESPONSES


@pytest.mark.parametrize("after", [FORM_S / 2, FORM_S + SEND_S / 2])
def test_the_last_member_that_dies_does_not_hold_up_the_trainer(after: float):
    at = published_at(1, 1) + after
    trace = (TraceEvent(at, "n0", False), TraceEvent(at + 3.0, "n0", True))
    out = broadcast(1, trace).run()
    assert out.num_broken == 1
    waited_s = after + LINE.lost_after_s + FORM_S + SEND_S  # and then sent the next version
    assert out.device_times["trainer"]["publish"] == pytest.approx(waited_s)
    assert out.counters["trained_responses"] == 3 * RESPONSES


@pytest.mark.parametrize("seed", [1, *e2e([0, *range(2, 6)])])
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_members_that_die_at_any_time_leave_nobody_stuck(mode: str, seed: int):
    """Reserved nodes and spot nodes, one of each kind dying every few seconds."""
    rng = random.Random(seed)
    num = rng.choice([4, MANY])
    spot = synthetic_trace(4, 200.0, up_s=20.0, down_s=4.0, seed=seed)
    trace = list(spot)
    for k in range(1, 4):
        for at in sorted(rng.uniform(5.0, 60.0) for _ in range(rng.randint(1, 3))):
            trace += [TraceEvent(at, f"n{k}", False), TraceEvent(at + 3.0, f"n{k}", True)]
    trace.sort(key=lambda e: (e.at_s, e.node, e.added))
    settings = {"broadcast": mode, "max_staleness": rng.choice([0, 1]), "num_steps": 8}
    transfer = {"delta_ratio": 0.1, "form_s": rng.choice([0.1, 2.0])}
    runs = [
        broadcast(num, tuple(trace), transfer, check=num == 4 and not k, **settings)
        for k in range(2)
    ]
    out = runs[0].run()
    assert len(out.broadcasts_s) > 0
    assert out.counters["trained_responses"] == 8 * RESPONSES
    assert out == runs[1].run()


def test_the_trainer_trains_nothing_while_it_sends():
    off = broadcast(max_staleness=1, broadcast="off", num_steps=5).run()
    out = broadcast(max_staleness=1, num_steps=5, broadcast="always").run()
    publishing = out.device_times["trainer"]["publish"]
    assert off.device_times["trainer"]["publish"] == 0
    assert publishing >= 4 * SEND_S
    assert sum(out.device_times["trainer"].values()) == pytest.approx(out.elapsed_s)


def test_nobody_is_a_member_on_the_machines_of_the_trainer_nor_of_a_version_without_bytes():
    scenario = replace(COLOCATED, transfer=LINE)
    colocated = world(scenario, broadcast="auto", num_steps=3)
    assert not colocated.run().broadcasts_s
    assert colocated.core.fleet.broadcasts.num_groups == 0
    nothing = broadcast(transfer={"num_bytes": 0.0})
    assert nothing.run() == broadcast(transfer={"num_bytes": 0.0}, broadcast="off").run()
