"""What a run waits for, in virtual time: each thing, and which is named of several."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lightrl.core.commands import Command
from lightrl.core.events import DrainRequested, MessageArrived, NodeLost, ResponseScored
from lightrl.core.waits import Scoring, Wait, WaitClock, WaitKind, decide
from lightrl.messages.nodes import Heartbeat
from lightrl.messages.sharing import DevicesReleased
from lightrl.messages.training import StepDone
from tests.core.conftest import Driver, held_out
from tests.core.test_worlds import NUM_EVENTS, settings, sharing
from tests.core.world import World

K = WaitKind
NONE = Scoring()


def kind(d: Driver, scoring: Scoring = NONE) -> WaitKind | None:
    wait = decide(d.core, scoring)
    return None if wait is None else wait.kind


def wait_of(d: Driver, scoring: Scoring = NONE) -> Wait:
    wait = decide(d.core, scoring)
    assert wait is not None
    return wait


def beat(d: Driver, name: str, **said: Any) -> None:
    """By default its engine, or its ranks, have started."""
    d.feed(MessageArrived(name, Heartbeat(**{"device": "cpu", **said})))


def test_from_nothing_to_the_first_token(driver):
    d = driver
    assert wait_of(d) == Wait(K.TRAINER, num=1, of=1)  # before the rollout node, which lacks too
    d.now = 2.0
    d.join("t", "trainer")
    assert kind(d) is K.ROLLOUT  # before ranks, which come by themselves
    d.now = 3.0
    d.join("a")
    d.join("b")
    assert wait_of(d) == Wait(K.RANKS, nodes=("t",))
    d.now = 5.0
    d.publish(0)
    assert wait_of(d) == Wait(K.ENGINES, nodes=("a", "b"))
    beat(d, "b")  # what has an engine comes first: the version is on its way there
    assert wait_of(d) == Wait(K.WEIGHTS, step=0, nodes=("b",))
    d.confirm("b", 0)
    assert kind(d) is None  # it samples; nobody waits for the other one


def test_a_run_waits_for_each_part_of_a_step(driver):
    d = driver
    d.start("a", slots=4)
    beat(d, "a")
    assert kind(d) is None
    d.now = 10.0
    for name in d.running()[:3]:
        d.finish(name)
    assert wait_of(d) == Wait(K.TAIL, num=1, step=0, nodes=("a",))
    assert kind(d, Scoring(2, 1)) is K.SCORES  # more wait for one worker than are to be sampled
    assert kind(d, Scoring(2, 2)) is K.TAIL  # both are being scored
    [last] = d.running()
    d.now = 12.0
    d.tokens(last, 9, finish="stop")
    assert wait_of(d, Scoring(1, 3)) == Wait(K.SCORES, num=1, of=3, step=0)
    d.now = 14.0
    d.score(last)
    assert wait_of(d) == Wait(K.TRAINING, step=0)
    beat(d, "t", is_saving=True)
    assert wait_of(d) == Wait(K.CHECKPOINT, step=0)
    beat(d, "t")
    d.now = 20.0
    d.publish(1)  # how the step ended is not said yet: a node that has the version does not sample
    assert kind(d) is K.TRAINING
    d.feed(MessageArrived("t", StepDone(0, 1, {})))
    assert wait_of(d) == Wait(K.WEIGHTS, step=1, nodes=("a",))
    d.now = 21.0
    d.confirm("a", 1)
    assert kind(d) is None
    d.finish_round()
    assert wait_of(d) == Wait(K.TRAINING, step=1, usual_s=6.0)


def test_the_tail_is_a_tenth_of_the_responses():
    d = Driver(prompts_per_step=10, group_size=3, num_steps=1)
    d.start("a", "b", slots=15)
    assert kind(d) is None
    while len(d.running()) > 4:
        d.finish(d.running()[0])
    assert kind(d) is None
    d.finish(d.running()[0])
    assert wait_of(d).num == 3
    assert wait_of(d).kind is K.TAIL


def test_what_waits_for_a_slot_is_no_tail():
    d = Driver(prompts_per_step=10, group_size=3, num_steps=1)
    d.start("a", slots=3)
    assert len(d.running()) == 3
    assert kind(d) is None
    assert kind(d, Scoring(20, 1)) is None  # more are still to be sampled
    d.feed(NodeLost("a", "gone"))
    assert kind(d) is K.ROLLOUT


def test_a_trainer_that_is_lost_is_named_first_and_when_the_run_ends_for_it(driver):
    d = driver
    d.start("a")
    d.now = 7.0
    d.feed(NodeLost("t", "connection lost"))
    assert wait_of(d) == Wait(K.TRAINER_LOST, num=1, of=1, ends_at=67.0)
    d.feed(NodeLost("a", "connection lost"))
    assert kind(d) is K.TRAINER_LOST
    d.now = 9.0
    d.join("t", "trainer", incarnation=2)
    assert kind(d) is K.ROLLOUT


def test_a_trainer_that_comes_back_loads_and_trains_again(driver):
    d = driver
    d.start("a")
    d.finish_round()
    d.now = 8.0
    d.feed(NodeLost("t", "connection lost"))
    d.now = 9.0
    d.join("t", "trainer", incarnation=2)
    assert wait_of(d) == Wait(K.RANKS, nodes=("t",))
    d.publish(0)
    assert kind(d) is K.TRAINING


def test_one_of_several_trainer_nodes(driver):
    d = Driver(num_trainers=2)
    d.join("t", "trainer")
    assert wait_of(d) == Wait(K.TRAINER, num=1, of=2)
    d.join("u", "trainer")
    assert kind(d) is K.ROLLOUT


def test_whoever_samples_ahead_does_not_wait_for_the_trainer():
    d = Driver(max_staleness=1, num_steps=4)
    d.start("a", slots=8)
    first = [r for r in d.running() if d.held(r).group.round.step == 0]
    for name in first:
        d.finish(name)
    assert d.round.state == "closed"
    assert d.running()
    assert kind(d) is None
    d.finish_round()
    assert kind(d) is K.TRAINING  # it may go no further ahead


def test_devices_that_change_sides():
    d = Driver(num_steps=4)
    d.join("t", "trainer", is_released=True)
    d.publish(0)
    d.join("a", shares="t")
    d.feed(MessageArrived("t", DevicesReleased("trainer", 0, 0, 0.0)))
    d.confirm("a", 0)
    d.now = 4.0
    d.finish_round()
    assert wait_of(d) == Wait(K.DEVICES, step=0, nodes=("a",))
    d.now = 5.0
    d.feed(MessageArrived("a", DevicesReleased("rollout", d.core.fleet.nodes["a"].order, 0, 0.1)))
    assert kind(d) is K.TRAINING
    d.train(0)
    assert kind(d) is K.DEVICES  # the engine sleeps, and the ranks have not parked
    d.feed(MessageArrived("t", DevicesReleased("trainer", 0, 0, 0.0)))
    assert kind(d) is K.ENGINES  # it was told to wake, and nobody has heard of its engine


def test_the_end_of_a_run(driver):
    d = driver
    d.start("a")
    for _ in range(2):
        d.finish_round()
        d.next_step()
    assert d.core.state == "finishing"
    assert wait_of(d) == Wait(K.LAST_CHECKPOINT, step=2)


def test_a_run_that_was_stopped_waits_for_its_nodes(driver):
    d = driver
    d.start("a", "b")
    d.feed(DrainRequested("*", "lightrl down"))
    assert wait_of(d) == Wait(K.LEAVING, nodes=("a", "b", "t"))


def test_prompts_that_are_not_there_yet():
    d = Driver()
    d.answer = lambda commands: commands  # nobody answers DrawPrompts
    d.start("a")
    assert wait_of(d) == Wait(K.PROMPTS, num=2, step=0)


def test_scores_of_an_evaluation():
    d = Driver(eval_sets=held_out(2))
    d.start("a")
    names = d.running()
    for name in names:
        d.tokens(name, 9, finish="stop")
    assert wait_of(d, Scoring(2, 1)) == Wait(K.SCORES, num=2, of=1, step=0, is_eval=True)
    for name in names:
        d.feed(ResponseScored(name, d.held(name).attempt, 1.0, ""))
    assert kind(d) is None


def test_the_clock_knows_since_when_it_is_the_same():
    clock = WaitClock()
    tail, other = Wait(K.TAIL, num=5, step=1), Wait(K.TAIL, num=5, step=2)

    def since(wait: Wait | None, now: float) -> float | None:
        looked = clock.look(wait, now)
        return None if looked is None else looked.since

    assert since(tail, 3.0) == 3.0
    assert since(Wait(K.TAIL, num=2, step=1), 9.0) == 3.0  # fewer of the same
    assert since(other, 11.0) == 11.0
    assert since(None, 12.0) is None
    assert since(other, 13.0) == 13.0


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_in_seeded_worlds_something_is_named_whenever_nobody_samples(seed: int, shares: bool):
    """Nodes and trainers come, die and come back, scores are late: whenever the run has a round
    and nothing runs, it is said what for."""
    world = World(seed, **(sharing(seed) if shares else settings(seed)))
    feed, named = world.feed, Counter[WaitKind]()

    def look(act: Callable[[], list[Command]]) -> None:
        feed(act)
        core = world.core
        held = core.table.responses.values()
        unscored = sum(r.state == "done" and not (r.scored or r.resolved) for r in held)
        wait = decide(core, Scoring(unscored, 1))
        if wait is not None:
            named[wait.kind] += 1
        elif core.table.rounds and core.state in {"running", "evaluating"}:
            assert core.table.num_running, core.table.round

    world.feed = look
    world.live(NUM_EVENTS).heal()
    assert len(named) > 2
