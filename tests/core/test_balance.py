"""When running responses move, and when a node becomes slow."""

from typing import Any

import pytest

from lightrl.core.events import NodeDraining, TimerFired
from lightrl.core.nodes.speed import Speed
from lightrl.core.responses.balance import PAUSE_S
from lightrl.core.responses.placement import choose_migrations, pays
from lightrl.core.state import Node, Response
from tests.core.conftest import Driver
from tests.core.test_placement import node, waiting


def learned(step_s: float, slope: float = 0.0, noise: float = 0.0, count: int = 40) -> Speed:
    """Of a node that was seen with 1 to 8 responses; every other step took longer by `noise`."""
    speed = Speed()
    for at in range(count):
        for batch in range(1, 9):
            off = 1 + noise * (1 if (at + batch) % 2 else -1)
            speed.observe(batch, (step_s + slope * batch) * off)
    return speed


def two_nodes(here: Speed, there: Speed) -> tuple[list[Node], list[Response]]:
    responses = waiting(4)
    nodes = [node("a", slots=8, running=responses), node("b", slots=8)]
    nodes[0].speed, nodes[1].speed = here, there
    return nodes, responses


def test_gain_must_exceed_the_prefill_and_twice_the_error():
    assert pays((10.0, 0.0), (8.0, 0.0), cost_s=0.9)
    assert not pays((10.0, 0.0), (8.0, 0.0), cost_s=1.1)
    assert pays((10.0, 0.3), (8.0, 0.4), cost_s=0.4)
    assert not pays((10.0, 0.6), (8.0, 0.8), cost_s=0.1)


def test_small_gain_between_nodes_that_are_well_known_pays_and_between_others_does_not():
    nodes, _ = two_nodes(learned(0.022), learned(0.02))
    assert choose_migrations(nodes, lambda _: 2000.0) != []
    nodes, _ = two_nodes(Speed(0.022, 0.0, num_observed=1), Speed(0.02, 0.0, num_observed=1))
    assert choose_migrations(nodes, lambda _: 2000.0) == []


def decode(d: Driver, name: str, step_s: float, count: int, tokens: int = 1) -> None:
    """A node sends so many chunks of all its responses."""
    for _ in range(count):
        d.now += step_s * tokens
        for r in list(d.core.fleet.nodes[name].running.values()):
            d.tokens(r.id, *[7] * tokens)


def alone_among_two(**changes: Any) -> Driver:
    """One response on `a`; `b` is ready and idle, and it was looked at."""
    settings = {
        "prompts_per_step": 1,
        "group_size": 1,
        "max_response_tokens": 1000,
        "lease_s": 1e9,
        "slots": 2,
    }
    d = Driver(**settings | changes)
    d.start("a")
    return d


def test_node_that_turns_slow_gives_work_to_one_that_had_room_all_the_time():
    d = alone_among_two(prompts_per_step=2)
    d.join("b")
    d.confirm("b", 0)
    d.feed(TimerFired(), now=max(1.0, d.core.next_deadline() or 0.0))
    [on_a] = list(d.core.fleet.nodes["a"].running)[:1]
    for _ in range(12):
        for name in ("a", "b"):
            d.now += 0.05
            for r in list(d.core.fleet.nodes[name].running.values()):
                d.tokens(r.id, 7)
    before = dict(d.requests)
    for _ in range(8):
        d.now += 5.0
        for r in list(d.core.fleet.nodes["a"].running.values()):
            d.tokens(r.id, 7)
        deadline = d.core.next_deadline()
        if deadline is not None and deadline <= d.now + 5.0:
            d.feed(TimerFired(), now=max(d.now, deadline))
    assert before[on_a][0] == "a"
    assert d.requests[on_a][0] == "b"


@pytest.mark.parametrize("migration", [True, False])
def test_work_moves_from_a_slow_node_as_soon_as_nothing_waits(migration: bool):
    d = alone_among_two(prompts_per_step=5, migration=migration)
    d.join("b")
    d.confirm("b", 0)
    nodes = d.core.fleet.nodes
    nodes["a"].speed, nodes["b"].speed = learned(0.5), learned(0.02)
    [waits] = d.core.table.queue.waiting()
    d.finish(next(iter(nodes["b"].running)))
    assert d.requests[waits.id][0] == "b"
    assert d.core.next_deadline() == 1e9
    d.finish(next(iter(nodes["b"].running)))
    deadline = d.core.next_deadline() or 0.0
    assert (deadline == pytest.approx(PAUSE_S, abs=0.1)) == migration
    d.feed(TimerFired(), now=1.0)
    assert d.core.table.counters.migrations == migration


def test_node_that_drains_gives_up_all_it_has_and_gets_nothing():
    d = alone_among_two(prompts_per_step=2)
    d.join("b")
    d.confirm("b", 0)
    d.feed(NodeDraining("a", "price"))
    for r in list(d.core.fleet.nodes["a"].running):
        d.tokens(r, 7, finish="abort")
    assert not d.core.fleet.nodes["a"].running
    assert {target for target, _ in d.requests.values()} == {"b"}
