"""What is learned of a run's steps, how many nodes it asks for, and what it has paid for."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from lightrl.core.commands import Command, Scale
from lightrl.core.events import NodeLeft, NodeLost, TimerFired
from lightrl.core.nodes.cost_model import Forecast, Prices
from lightrl.core.settings import Tail
from lightrl.core.state import NodeState
from lightrl.messages.nodes import Drain
from lightrl.metrics.cost_and_nodes import cost_row
from lightrl.sim.inputs.nodes import SPOT
from lightrl.sim.inputs.scenario import SimTraining, Switches
from lightrl.sim.world import World
from tests.core.conftest import Driver, of_kind, sent
from tests.sim.conftest import SCENARIO, SETTINGS, NodeSpec

PRICES = Prices(36.0, 18.0)


def clocked(**changes: Any) -> Driver:
    """A trainer and a reserved rollout node; nodes sample one response at a time."""
    d = Driver(**{"num_steps": 50, "prices": PRICES, "slots": 1, **changes})
    d.start("a")
    return d


def sample(d: Driver, length: int = 8, second: float = 1.0) -> list[Command]:
    """The open round, each token so many seconds after the last, and its step."""
    while waiting := d.running():
        d.now += second
        for name in waiting:
            last = len(d.held(name).tokens) + 1 == length
            d.tokens(name, 9, finish="stop" if last else None)
            if last:
                d.score(name)
    d.now += 1.0
    return d.next_step()


def test_nodes_are_paid_for_as_long_as_they_are_there():
    d = Driver()
    d.join("t", "trainer")
    d.now = 10.0
    d.join("spot", is_preemptible=True)
    d.now = 15.0
    d.join("a")
    d.now = 18.0
    d.feed(NodeLost("spot", "gone"))
    d.now = 20.0
    d.feed(TimerFired())
    learned = d.core.scaling.learned
    assert (learned.reserved_s, learned.preemptible_s) == (20.0 + 5.0, 8.0)


def test_shared_devices_are_paid_for_once():
    d = Driver(prices=PRICES)
    d.join("t", "trainer", is_released=True)
    for name in "ab":
        d.join(name, shares="t", is_released=True)
    d.join("c")
    assert cost_row(d.core).reserved == 2
    d.now = 10.0
    d.feed(TimerFired())
    assert d.core.scaling.learned.reserved_s == 20.0


def test_a_node_that_says_otherwise_when_it_comes_back_is_counted_once():
    d = Driver()
    d.join("a", is_preemptible=True)
    d.join("a", is_preemptible=True)
    assert d.core.fleet.num_preemptible == 1
    d.join("a", incarnation=2)
    assert d.core.fleet.num_preemptible == 0
    d.feed(NodeLost("a", "gone"))
    assert d.core.fleet.num_preemptible == 0


def test_a_clock_that_goes_back_takes_nothing_away():
    d = Driver()
    d.join("a")
    d.feed(TimerFired(), now=4.0)
    d.feed(TimerFired(), now=1.0)
    d.feed(TimerFired(), now=2.0)
    assert d.core.scaling.learned.reserved_s == 5.0


def test_a_step_is_learned_as_it_was():
    d = clocked()
    assert d.core.scaling.forecast() is None
    sample(d)
    [work] = d.core.scaling.learned.kinds.values()
    assert (work.num, work.total, work.mean) == (1, 32.0, 8.0)
    assert work.alone_s == pytest.approx(8.0, rel=0.15)
    forecast = d.core.scaling.forecast()
    assert forecast is not None
    # 32 s of tokens, 1 s until the version was published; loading took no time
    assert forecast.step_s(0) == pytest.approx(33.0, rel=0.15)
    assert forecast.step_s(1) == pytest.approx(17.0, rel=0.15)
    assert forecast.step_s(100) == pytest.approx(9.0, rel=0.4)
    assert (forecast.samplers, forecast.reserved) == (1, 2)


def test_a_jump_of_the_clock_is_not_taken_for_a_slow_step():
    d = clocked()
    for _ in range(4):
        sample(d)
    before = forecast_of(d).step_s(0)
    d.now += 1e6
    sample(d)
    assert forecast_of(d).step_s(0) < 3 * before


def test_with_tail_batching_nothing_is_foreseen_before_a_whole_period():
    d = clocked(tail=Tail(eta_prompts=2.0))
    kinds: list[str] = []
    while d.core.scaling.forecast() is None:
        kinds.append(d.round.kind)
        sample(d)
        assert len(kinds) < 10
    assert set(kinds) == {"short", "long"}


def forecast_of(d: Driver) -> Forecast:
    forecast = d.core.scaling.forecast()
    assert forecast is not None
    return forecast


def test_the_number_wanted_is_said_once_and_again_when_it_changes():
    d = clocked(scale_max=3)
    commands = sample(d)
    [scale] = of_kind(commands, Scale)
    assert 0 <= scale.wanted <= 3
    assert [of_kind(sample(d), Scale) for _ in range(5)] == [[]] * 5


def test_fewer_are_wanted_when_three_steps_in_a_row_want_fewer():
    d = clocked(scale_max=3, prices=Prices(1.0, 1e6))  # none is worth that
    d.core.scaling.learned.wanted = 3
    assert [of_kind(sample(d), Scale) for _ in range(4)] == [[], [], [Scale(0)], []]


def test_nobody_is_asked_for_without_a_largest_number():
    d = clocked()
    assert of_kind(sample(d), Scale) == []


def test_nodes_that_flap_do_not_make_the_number_flap():
    d = clocked(scale_max=20)
    said: list[Scale] = []
    for number in range(12):
        said += of_kind(sample(d), Scale)
        name = f"spot{number}"
        d.join(name, is_preemptible=True)
        d.confirm(name, d.round.step)
        d.now += 1.0
        d.feed(NodeLost(name, "gone"))
    assert len(said) <= 2


FREE = Prices(36.0, 0.0)  # as many as there may be


def spots(d: Driver, *names: str) -> None:
    for name in names:
        d.join(name, is_preemptible=True)
        d.confirm(name, d.round.step)


def test_nodes_beyond_the_number_leave_between_two_steps_the_newest_of_idle_ones_first():
    d = clocked(prices=FREE, scale_max=1, scale_drain=True)
    spots(d, "s0", "s1", "s2")
    commands = sample(d)
    assert of_kind(commands, Scale) == [Scale(1)]
    assert [node for node, _ in sent(commands, Drain)] == ["s2", "s1"]
    nodes = d.core.fleet.nodes
    assert {n for n in nodes if nodes[n].state is NodeState.DRAINING} == {"s1", "s2"}
    # nothing new goes there, nobody is told twice, and the others go on
    assert not nodes["s1"].running
    assert sent(sample(d), Drain) == []
    assert d.core.step == 2


def test_a_busy_node_leaves_before_one_that_would_finish_later_and_loses_nothing():
    """In asynchronous mode nodes have work of the next step when one ends."""
    d = clocked(prices=FREE, scale_max=1, scale_drain=True, max_staleness=1)
    spots(d, "s0", "s1")
    while d.core.steps.opened < 2 or any(d.held(r).group.round.step == 0 for r in d.running()):
        d.now += 1.0
        for name in d.running():
            held = d.held(name)
            if held.group.round.step == 0:
                d.finish(name) if len(held.tokens) > 1 else d.tokens(name, 9)
            elif held.node is d.core.fleet.nodes["s0"] and not held.tokens:
                d.tokens(name, *[9] * 8)  # it has less before it than all others
    busy = {n: list(d.core.fleet.nodes[n].running) for n in ("s0", "s1")}
    assert all(busy.values())
    d.now += 1.0
    commands = d.train(0)
    assert [node for node, _ in sent(commands, Drain)] == ["s0"]
    # it says good-bye, and what it had goes on from its tokens
    d.feed(NodeLeft("s0", "drained", ok=True))
    assert all(len(d.held(name).tokens) == 8 for name in busy["s0"])
    assert d.core.step == 1


def test_the_number_is_known_to_a_coordinator_that_is_started_again():
    d = clocked(scale_max=3)
    sample(d)
    before = d.core.scaling.learned.copy()
    assert before.wanted is not None
    commands = d.restart()
    assert d.core.scaling.learned == before
    # the command may not have been carried out
    assert of_kind(commands, Scale) == [Scale(before.wanted)]
    d.now += 5.0
    d.join("a")
    d.feed(TimerFired(), now=d.now + 3.0)
    assert d.core.scaling.learned.reserved_s == before.reserved_s + 3.0


@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_of_which_nobody_saw_the_beginning_teaches_nothing(steps: int):
    """Whether its round stands in what the journal's segment begins with, or after that."""
    d = clocked()
    for _ in range(steps):
        sample(d)
    before = dict(d.core.scaling.learned.kinds)
    d.restart()
    d.join("t", "trainer", incarnation=2)
    d.publish(steps)
    d.join("a", incarnation=2)
    d.confirm("a", steps)
    sample(d)
    assert d.core.step == steps + 1
    assert d.core.scaling.learned.kinds == before
    sample(d)
    assert d.core.scaling.learned.kinds != before


# Against the simulator


APART = SimTraining(token_s=1e-5, step_s=0.5)
IN_TURNS = SimTraining(token_s=4e-4, step_s=0.0, switch_s=0.1, placement="colocated")


def fleet(
    seed: int, reserved: int, spot: int, training: SimTraining = APART, **changes: Any
) -> tuple[World, float]:
    """A run of that many nodes, and what its steps took but for the first."""
    workload = replace(SCENARIO.workload, num_prompts=600)
    nodes = [NodeSpec(f"n{k}", 8) for k in range(reserved)]
    nodes += [NodeSpec(f"s{k}", 8, kind=SPOT) for k in range(spot)]
    settings = replace(
        SETTINGS, run_seed=seed, num_steps=5, prompts_per_step=48, slots=8, **changes
    )
    scenario = replace(SCENARIO, workload=workload, training=training)
    world = World(settings, scenario, nodes, switches=Switches(offload="foreseen"))
    steps = world.run().steps
    return world, fmean(step.step_s for step in steps[1:])


@pytest.mark.parametrize(
    ("training", "reserved", "spot"),
    [
        *((APART, *nodes) for nodes in [(1, 1), (2, 1), (2, 2)]),
        *((IN_TURNS, *nodes) for nodes in [(2, 0), (2, 1), (4, 1), (2, 2)]),
    ],
    ids=lambda x: x.placement if isinstance(x, SimTraining) else str(x),
)
def test_one_node_more_saves_what_was_foreseen(training: SimTraining, reserved: int, spot: int):
    foreseen, saved = 0.0, 0.0
    for seed in range(3):
        world, step_s = fleet(seed, reserved, spot, training)
        _, with_one_more = fleet(seed, reserved, spot + 1, training)
        learned = world.core.scaling.learned
        assert learned.engine is not None
        shared = reserved if training is IN_TURNS else 0
        forecast = Forecast(learned.engine, learned.kinds, reserved, reserved + 1, shared=shared)
        foreseen += forecast.step_s(spot) - forecast.step_s(spot + 1)
        saved += step_s - with_one_more
    assert saved > 0
    assert foreseen == pytest.approx(saved, rel=0.5)
