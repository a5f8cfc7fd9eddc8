"""Devices change sides: who is told what, in which order, and what happens if somebody is not there
to hear it."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from lightrl.core.commands import Command, ReplayShards, Report, Send
from lightrl.core.events import (
    DrainRequested,
    MessageArrived,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeLost,
    ShardLeft,
    TimerFired,
)
from lightrl.core.settings import Tail
from lightrl.core.sharing.sharing_rules import Change, StepTimes, View
from lightrl.messages.load import Load
from lightrl.messages.nodes import PROTOCOL, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import Abort, Generate
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import PublishWeights, WeightsFailed
from lightrl.metrics.cost_and_nodes import cost_row
from tests.core.conftest import SLEEP, WAKE, Driver, held_out, of_kind, order_of, sent, suspend


class Script:
    """A rule that says what it was given, one change after the other."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.learned: list[StepTimes] = []
        self.views: list[View] = []

    def decide(self, view: View, now: float) -> Change:
        self.views.append(view)
        return self.changes.pop(0) if self.changes else Change()

    def learn(self, step: StepTimes) -> None:
        self.learned.append(step)


def shared(*names: str, others: Iterable[str] = (), **changes: object) -> tuple[Driver, Script]:
    """A run at version 0 whose nodes `names` use the trainer's devices, and others that do not."""
    d = Driver(**{"num_steps": 9, "release_s": 20.0, **changes})
    d.core.policy.rule = script = Script()
    d.join("t", "trainer", is_released=True)
    d.publish(0)
    for name in names:
        d.join(name, shares="t", is_released=True)
    for name in others:
        d.join(name)
    for name in (*names, *others):
        d.confirm(name, 0)
    return d, script


def later(d: Driver, script: Script, change: Change) -> None:
    """What the rule says the next time that it is asked; not so soon that nobody asks."""
    d.now += 1.0
    script.changes.append(change)


def released(d: Driver, name: str, number: int | None = None) -> list[Command]:
    order = d.core.fleet.nodes[name].order if number is None else number
    return d.feed(MessageArrived(name, DevicesReleased("rollout", order, 0, 0.5)))


def parked(d: Driver, number: int = 0, trainer: str = "t") -> list[Command]:
    return d.feed(MessageArrived(trainer, DevicesReleased("trainer", number, 0, 0.1)))


def orders(commands: list[Command]) -> list[tuple[str, object]]:
    kinds = SetDevices | TrainShard
    told = [c for c in commands if isinstance(c, Send) and isinstance(c.message, kinds)]
    return [(c.node, order_of(c.message)) for c in told]


def state(d: Driver, name: str) -> str:
    return str(d.core.fleet.nodes[name].state)


def test_a_step_from_side_to_side():
    d, _ = shared("a")
    assert state(d, "a") == "ready"
    commands = d.finish_round()
    assert orders(commands) == [("a", SLEEP)]
    assert state(d, "a") == "releasing"
    assert orders(released(d, "a")) == [("t", TrainShard)]
    assert state(d, "a") == "released"
    assert orders(parked(d)) == []
    commands = d.publish(1)
    assert [n for n, _ in sent(commands, PublishWeights)] == ["a"]  # it pulls asleep
    assert orders(commands) == [("a", WAKE)]
    d.feed(MessageArrived("t", StepDone(0, 1, {})))
    assert state(d, "a") == "updating"
    assert d.core.step == 0
    assert sent(d.confirm("a", 1), Generate) != []
    assert (d.core.step, state(d, "a")) == (1, "ready")


def test_no_shard_leaves_while_others_still_have_the_devices():
    d, _ = shared("a", "b")
    d.finish("p0@0#0")
    assert orders(d.finish("p0@0#1")) == []  # a group is complete
    assert orders(d.finish_round()) == [("a", SLEEP), ("b", SLEEP)]
    assert orders(released(d, "a")) == []
    assert orders(released(d, "b")) == [("t", TrainShard)]


def test_nodes_with_devices_of_their_own_change_nothing():
    d, _ = shared(others="a")
    d.finish("p0@0#0")
    assert orders(d.finish("p0@0#1")) == [("t", TrainShard)]
    d.finish_round()
    assert orders(d.train(0)) == []


def test_what_ran_goes_on_elsewhere_from_its_last_tokens():
    d, script = shared("a", others="b", slots=4)
    d.feed(NodeLost("b", "gone"))
    d.join("b", slots=4)
    later(d, script, Change(release=("a",)))
    commands = d.confirm("b", 0)
    assert orders(commands) == [("a", SLEEP)]
    assert len(d.running()) == 4
    d.tokens("p0@0#0", 7)  # on its way meanwhile
    commands = d.tokens("p0@0#1", 8, 9, finish="abort")
    [(node, again)] = sent(commands, Generate)
    assert (node, [r.response for r in again.requests]) == ("b", ["p0@0#1"])
    [(node, again)] = sent(released(d, "a"), Generate)
    assert node == "b"
    assert {r.response for r in again.requests} == {"p0@0#0", "p1@0#0", "p1@0#1"}
    assert list(d.held("p0@0#0").tokens) == [7]
    d.tokens("p0@0#0", 1, node="a", attempt=1)  # of an attempt that is over
    assert list(d.held("p0@0#0").tokens) == [7]
    assert d.core.table.counters.responses_moved == 4


@pytest.mark.parametrize("ahead", [True, False])
def test_a_surplus_response_with_enough_siblings_ahead_is_given_up_rather_than_moved(ahead: bool):
    d, script = shared("a", others="b", slots=3, tail=Tail(1.0, 1.5), prompts_per_step=1)
    d.feed(NodeLost("b", "gone"))
    d.join("b", slots=3)
    d.finish("p0@0#0", 1.0, 1, 2)
    d.tokens("p0@0#2", 1)
    later(d, script, Change(release=("a",)))
    assert orders(d.confirm("b", 0)) == [("a", SLEEP)]
    if ahead:
        d.finish("p0@0#1", 1.0, 1, 2)  # two are all that the group keeps
    else:
        d.finish("p0@0#1", 1.0, 1, 2, 3)
    d.tokens("p0@0#2", 2)
    moved = [r.response for _, m in sent(released(d, "a"), Generate) for r in m.requests]
    assert moved == ([] if ahead else ["p0@0#2"])


def test_devices_come_back_within_the_step_once_the_ranks_are_parked():
    d, script = shared("a", others="b", slots=4)
    d.disk_is_slow = True
    later(d, script, Change(release=("a",)))
    d.finish("p0@0#0")
    assert orders(d.finish("p0@0#1")) == []
    assert orders(released(d, "a")) == [("t", TrainShard)]
    later(d, script, Change(take_back=("a",)))
    commands = d.feed(NodeLost("b", "gone"))
    assert orders(commands) == []  # the shard has not left: the ranks would take the devices again
    assert orders(d.feed(ShardLeft(0, 0))) == [("t", suspend(1))]
    assert orders(parked(d, 7)) == []  # no answer to that
    commands = parked(d, 1)
    assert orders(commands) == [("a", WAKE)]
    assert sent(commands, PublishWeights) == []  # it has the version
    assert sent(d.confirm("a", 0), Generate) != []
    d.disk_is_slow = False
    assert orders(d.finish_round()) == [("a", SLEEP)]
    assert orders(released(d, "a")) == [("t", TrainShard)]


def test_one_that_is_taken_back_before_it_slept_is_told_so_when_it_does():
    """What it says of its version until then, it says as one that is to sleep."""
    d, script = shared("a", others="b", slots=4)
    later(d, script, Change(release=("a",)))
    d.finish("p0@0#0")
    assert state(d, "a") == "releasing"
    d.core.policy.on_lost("a")  # whoever decides so
    assert orders(d.feed(TimerFired())) == []
    d.confirm("a", 0)
    assert state(d, "a") == "releasing"
    assert orders(released(d, "a")) == [("a", WAKE)]
    d.confirm("a", 0)
    assert state(d, "a") == "ready"


def test_one_that_keeps_its_devices_is_lost():
    d, _ = shared("a", "b")
    d.finish_round()
    released(d, "b")
    assert d.core.next_deadline() == 5.0  # of leases
    d.now = 19.0
    for name in "tab":
        d.core.fleet.nodes[name].heard_at = d.now
    d.feed(TimerFired())
    assert d.core.next_deadline() == 20.0
    d.now = 20.0
    commands = d.feed(TimerFired())
    assert [r.text for r in of_kind(commands, Report)] == ["a lost (kept its devices for 20 s)"]
    assert orders(commands) == [("t", TrainShard)]


def keep_alive(d: Driver, now: float) -> list[Command]:
    """Time passes, and nodes are heard."""
    d.now = now
    for node in d.core.fleet.nodes.values():
        node.heard_at = now
    return d.feed(TimerFired())


def test_one_whose_engine_may_still_start_has_its_patience_more_and_no_switch_is_measured():
    d, _ = shared("a", others="b", patience_s=60.0)
    d.finish_round()
    released(d, "a")
    measured = d.core.policy.memory().switch_s
    parked(d)
    d.publish(1)
    d.feed(MessageArrived("t", StepDone(0, 1, {})))
    d.confirm("b", 1)
    assert state(d, "a") == "updating"
    assert orders(d.finish_round()) == [("a", SLEEP)]
    assert of_kind(keep_alive(d, 79.0), Report) == []
    assert d.core.next_deadline() == 80.0
    assert orders(released(d, "a")) == [("t", TrainShard)]
    assert d.core.policy.memory().switch_s == measured
    parked(d)
    d.publish(2)
    d.feed(MessageArrived("t", StepDone(1, 2, {})))
    d.confirm("a", 2)
    d.confirm("b", 2)
    d.finish_round()
    assert [r.text for r in of_kind(keep_alive(d, 99.0), Report) if r.is_warning] == [
        "a lost (kept its devices for 20 s)"
    ]


def test_one_whose_engine_died_before_it_was_told_may_start_another_one():
    d, _ = shared("a")
    d.finish_round()
    d.feed(MessageArrived("a", WeightsFailed(0, "it died")))
    assert of_kind(keep_alive(d, 79.0), Report) == []
    [lost] = of_kind(keep_alive(d, 80.0), Report)
    assert lost.text == "a lost (kept its devices for 80 s)"


def test_an_engine_wakes_when_all_trainer_nodes_of_its_devices_are_parked():
    d = Driver(num_trainers=2, num_steps=9)
    d.join("t", "trainer", is_released=True)
    d.join("u", "trainer", is_released=True)
    d.publish(0)
    for name, trainer in (("a", "t"), ("b", "u")):
        d.join(name, shares=trainer, is_released=True)
        d.confirm(name, 0)
    assert orders(d.finish_round()) == [("a", SLEEP), ("b", SLEEP)]
    assert orders(released(d, "a")) == []
    assert orders(released(d, "b")) == [("t", TrainShard)]
    parked(d)
    assert orders(d.publish(1)) == [("u", suspend(1))]  # its word is on the way, or not
    assert orders(parked(d, 0, "u")) == [("a", WAKE), ("b", WAKE)]


def test_who_shares_with_nobody_is_refused_once_that_is_certain():
    d = Driver(num_trainers=2)
    d.join("t", "trainer")
    d.join("a", shares="u")
    d.join("b", shares="t")
    why = "shares the devices of u, which is no trainer node of this run"
    commands = d.join("v", "trainer")
    assert sent(commands, Welcome) == [("a", Welcome("", refused=why))]
    assert set(d.core.fleet.nodes) == {"t", "v", "b"}
    assert [r.text for r in of_kind(commands, Report) if r.is_warning][-1:] == [f"a refused: {why}"]
    [(_, refusal)] = sent(d.join("c", shares="u"), Welcome)
    assert refusal.refused == why


def test_who_shares_devices_of_another_machine_is_told_of_it():
    d, _ = shared("a")
    assert [r.text for r in of_kind(d.join("b", shares="t"), Report) if r.is_warning] == []
    warned = [r for r in of_kind(d.join("c", shares="t", host="h2"), Report) if r.is_warning]
    [text] = [r.text for r in warned]
    assert text == "c is to share the devices of t: that is on h, and c on h2"


def test_a_second_trainer_for_the_same_devices_is_refused_and_its_word_counts_for_nothing():
    d, _ = shared("a")
    [(_, refusal)] = sent(d.join("u", "trainer"), Welcome)
    assert refusal.refused == "this run has a trainer node already"
    assert orders(d.finish_round()) == [("a", SLEEP)]
    assert orders(parked(d, 0, "u")) == []
    assert orders(released(d, "a")) == [("t", TrainShard)]
    assert orders(parked(d, 0, "u")) == []
    assert orders(parked(d)) == []
    assert orders(d.publish(1)) == [("a", WAKE)]


def test_asynchronous_runs_have_no_shared_devices():
    [(_, refusal)] = sent(Driver(max_staleness=1).join("a", shares="t"), Welcome)
    assert refusal.refused.startswith("shares the devices of t, which async.max_staleness = 1")


def test_orders_that_were_lost_with_a_connection_are_given_again():
    d, _ = shared("a", slots=4)
    d.finish_round()
    [(_, again)] = sent(d.join("a", shares="t", serves=0), SetDevices)
    assert again.number == 3
    assert orders(released(d, "a", number=2)) == []
    assert orders(released(d, "a", number=3)) == [("t", TrainShard)]
    parked(d)
    d.publish(1)
    d.feed(MessageArrived("t", StepDone(0, 1, {})))
    [(_, wake)] = sent(d.join("a", shares="t", is_released=True, serves=0), SetDevices)
    assert wake.number == 5
    d.confirm("a", 1)
    assert state(d, "a") == "ready"


@pytest.mark.parametrize("is_closed", [False, True], ids=["round open", "round closed"])
@pytest.mark.parametrize("has_ranks", [False, True], ids=["parked", "training"])
def test_coordinator_that_died_with_devices_half_changed(is_closed: bool, has_ranks: bool):
    """The resumed run neither starts both sides nor leaves them idle."""
    d, script = shared("a", "b", others="c", slots=1)
    later(d, script, Change(release=("a", "b")))
    d.finish("p0@0#0")
    released(d, "a")
    if is_closed:
        d.finish_round()
    d.restart()
    d.join("a", shares="t", is_released=True, serves=0)
    commands = d.join("b", shares="t", serves=0)
    assert orders(commands) == ([("b", SLEEP)] if is_closed else [])
    d.join("c", serves=0)
    d.join("t", "trainer", is_released=not has_ranks)
    commands = d.publish(0)
    parks = [("t", suspend(1))] if has_ranks else []
    if is_closed:
        assert orders(commands) == parks
        if has_ranks:
            assert orders(parked(d, 1)) == []
        assert orders(released(d, "b")) == [("t", TrainShard)]
    elif has_ranks:
        assert orders(commands) == parks
        assert orders(parked(d, 1)) == [("a", WAKE)]
    else:
        assert state(d, "a") == "updating"  # since the trainer said that it was parked


def test_engines_wait_for_a_trainer_that_is_lost_and_not_for_one_that_left():
    for gone, wakes in ((NodeLost("t", "gone"), False), (NodeLeft("t", "moved", ok=True), True)):
        d, script = shared("a", others="b", slots=4)
        later(d, script, Change(release=("a",)))
        d.finish("p0@0#0")
        d.finish("p0@0#1")
        released(d, "a")
        d.feed(gone)
        later(d, script, Change(take_back=("a",)))
        d.feed(NodeLost("b", "gone"))
        assert state(d, "a") == ("updating" if wakes else "released")
        d.join("t", "trainer", incarnation=2, is_released=True)
        assert state(d, "a") == "updating"


def test_steps_that_are_trained_again_wait_for_the_devices_and_keep_them():
    d, _ = shared("a", slots=9)
    d.finish_round()
    released(d, "a")
    parked(d)
    d.train(0)
    d.confirm("a", 1)
    d.feed(NodeLost("t", "gone"))
    d.join("t", "trainer", incarnation=2, is_released=True)
    assert of_kind(d.publish(0), ReplayShards) == []  # a round is open
    assert orders(d.finish_round()) == [("a", SLEEP)]
    commands = released(d, "a")
    assert [r.step for r in of_kind(commands, ReplayShards)] == [0]
    assert orders(parked(d)) == []
    commands = d.publish(1)
    assert orders(commands) == [("t", TrainShard)]
    assert d.core.fleet.nodes["a"].is_asleep


def test_only_the_trainer_can_make_a_version_again_that_nobody_has():
    d, _ = shared("a", slots=9)
    d.finish_round()
    released(d, "a")
    parked(d)
    d.train(0)
    d.confirm("a", 1)
    d.feed(NodeLost("t", "gone"))
    d.feed(NodeLost("a", "gone"))
    d.join("a", incarnation=2, shares="t", is_released=True)
    d.join("t", "trainer", incarnation=2, is_released=True)
    assert orders(d.publish(0)) == [("a", SLEEP)]
    assert [r.step for r in of_kind(released(d, "a"), ReplayShards)] == [0]
    parked(d)
    assert orders(d.publish(1)) == [("a", WAKE)]


def test_a_run_that_is_stopped_hands_its_step_over_once_the_engines_are_gone():
    d, _ = shared("a", "b")
    d.finish_round()
    released(d, "a")
    commands = d.feed(DrainRequested("*", "enough"))
    assert {n for n, _ in sent(commands, Drain)} == {"a", "b"}
    d.feed(NodeDraining("b", "enough"))
    assert orders(d.feed(NodeLeft("a", "drained", ok=True))) == []
    commands = d.feed(NodeLeft("b", "drained", ok=True))
    assert orders(commands) == [("t", TrainShard)]
    assert [n for n, _ in sent(commands, Drain)] == ["t"]


def test_in_evaluations_all_sample_and_nothing_is_trained():
    d, script = shared("a", others="b", eval_sets=held_out(2), eval_interval=1)
    script.changes += [Change(release=("a",))] * 9
    assert d.round.is_eval
    while len(names := d.running()) > 1:
        d.now += 1.0
        assert orders(d.finish(names[0])) == []
    assert len(script.changes) == 9
    d.finish(names[0])
    assert not d.round.is_eval
    assert state(d, "a") == "releasing"


def test_an_engine_that_dies_asleep_or_cannot_wake_is_offered_the_version_again():
    d, _ = shared("a")
    d.finish_round()
    released(d, "a")
    d.feed(MessageArrived("a", WeightsFailed(0, "engine killed by SIGKILL")))
    assert state(d, "a") == "released"
    parked(d)
    d.train(0)
    commands = d.feed(MessageArrived("a", WeightsFailed(1, "engine killed by SIGKILL")))
    assert [n for n, _ in sent(commands, PublishWeights)] == ["a"]
    d.confirm("a", 1)
    assert state(d, "a") == "ready"


def test_one_that_comes_awake_beside_ranks_has_them_parked():
    """Nobody could say no to it: nobody shared when the shard left."""
    d, _ = shared("a", others="b", slots=4)
    d.feed(NodeLost("a", "gone"))
    d.finish("p0@0#0")
    assert orders(d.finish("p0@0#1")) == [("t", TrainShard)]
    assert orders(d.join("a", incarnation=2, shares="t")) == [("t", suspend(1))]
    assert orders(d.join("c", shares="t", is_released=True)) == []
    assert orders(parked(d, 1)) == [("c", WAKE)]


def test_one_that_is_started_again_after_its_release_is_released_again():
    d, script = shared("a", others="b", slots=4)
    later(d, script, Change(release=("a",)))
    d.finish("p0@0#0")
    released(d, "a")
    assert orders(d.join("a", incarnation=2, shares="t")) == [("a", SLEEP)]


def test_responses_of_a_sleeping_node_are_no_more():
    """A node says that it sleeps, and that it runs something: it does not."""
    d, _ = shared("a")
    [name, *_] = d.running()
    running = (((name), 1),)
    hello = Hello("a", 1, ("rollout",), PROTOCOL, 1, "h", shares="t", is_released=True)
    commands = d.feed(NodeJoined(replace(hello, running=running)))
    assert (name, 1) in [pair for _, abort in sent(commands, Abort) for pair in abort.attempts]
    assert d.running() == []
    assert orders(commands) == [("a", WAKE)]


def test_what_was_learned_outlives_the_coordinator():
    d, script = shared("a", others="b", slots=4, offload="window")
    metrics = {"timing_s/forward_backward": 3.0, "timing_s/optimizer": 1.0}
    d.now = 9.0
    later(d, script, Change(release=("a",)))
    d.finish("p0@0#0")
    d.now = 12.0
    released(d, "a")
    d.finish_round()
    d.now = 20.0
    parked(d)
    d.publish(1)
    d.feed(MessageArrived("t", StepDone(0, 1, metrics)))
    d.confirm("b", 1)
    [step] = script.learned
    assert (step.rollout_s, step.trainer_waited_s) == (12.0, 4.0)
    known = d.core.policy.memory()
    assert known.switch_s == 2.0
    assert known.training.means() == (4.0, 4.0)  # four tokens in four seconds
    assert known.longest == {"plain": 1}
    d.restart()
    assert d.core.policy.memory() == known


@pytest.mark.parametrize(("kv_tokens", "fits"), [(20, True), (11, False), (0, True)])
def test_whether_the_rest_fits_is_known_from_what_the_others_say_of_their_caches(kv_tokens, fits):
    d, script = shared("a", others="b", slots=4)
    d.feed(MessageArrived("b", Heartbeat(Load(kv_tokens=kv_tokens))))
    d.now += 1.0
    d.finish("p0@0#0")
    view = script.views[-1]
    assert view.kv_tokens == 12.0
    assert view.fits([d.core.fleet.nodes["b"]]) == fits


def test_figures_of_a_resumed_round_are_finite():
    d, _ = shared("a")
    metrics = {"timing_s/forward_backward": 3.0}
    for step in range(2):
        d.now += 5.0
        if step:
            d.restart()
            d.join("t", "trainer", is_released=True)
            d.publish(1)
            d.join("a", shares="t", is_released=True)
            d.confirm("a", 1)
        d.finish_round()
        released(d, "a")
        d.now += 4.0
        parked(d)
        d.publish(step + 1)
        d.feed(MessageArrived("t", StepDone(step, step + 1, metrics)))
        d.confirm("a", step + 1)
        figures = d.core.colocation.figures
        assert {"window_s", "waited_trainer_s"} <= set(figures)
        assert all(math.isfinite(figure) for figure in figures.values())


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_step_that_cannot_have_taken_so_long_teaches_nothing(seconds: float):
    d, script = shared("a")
    d.finish_round()
    released(d, "a")
    d.now += 5.0
    parked(d)
    d.publish(1)
    known = d.core.policy.memory()
    d.feed(MessageArrived("t", StepDone(0, 1, {"timing_s/forward_backward": seconds})))
    assert script.learned == []
    assert d.core.policy.memory() == known


def test_what_each_device_did_sums_to_the_step():
    d, script = shared("a", others="b", slots=4)
    d.now = 3.0  # a and b sample
    later(d, script, Change(release=("a",)))
    d.finish("p0@0#0")
    d.now += 2.0
    released(d, "a")
    d.now += 1.0
    d.finish_round()  # the shards leave
    d.now += 5.0
    parked(d)
    d.publish(1)
    d.now += 1.0
    d.feed(MessageArrived("t", StepDone(0, 1, {"timing_s/forward_backward": 4.0})))
    d.confirm("b", 1)
    assert d.core.step == 1
    seconds = {name: s for name, s in d.core.colocation.device_s.items() if s}
    assert seconds == {"a/rollout": 4.0, "a/switch": 3.0, "a/wait": 1.0, "a/train": 5.0}
    assert sum(seconds.values()) == d.now
    figures = d.core.colocation.figures
    assert figures == {
        "window_s": 4.0,
        "waited_trainer_s": 2.0,  # of the six since it had the devices
        "waited_remote_s": 5.0,
        "switches": 2.0,
        "moved": 3.0,
    }


def test_start_up_and_evaluations_are_of_no_step():
    d, _ = shared(eval_interval=1, eval_sets=held_out(1))
    d.join("a", shares="t", is_released=True)
    d.now = 30.0
    d.confirm("a", 0)  # it took half a minute to start
    for step in (0, 1):
        assert d.round.is_eval
        d.now += 7.0
        d.finish_round()
        assert (d.round.kind, d.round.step) == ("plain", step)
        begun_at = d.now
        d.now += 3.0
        d.finish_round()
        d.now += 1.0
        released(d, "a")
        d.now += 2.0
        parked(d)
        d.publish(step + 1)
        d.feed(MessageArrived("t", StepDone(step, step + 1, {})))
        d.now += 0.5
        d.confirm("a", step + 1)
        assert d.core.step == step + 1
        assert sum(d.core.colocation.device_s.values()) == d.now - begun_at
        assert d.core.colocation.figures["switches"] == 2.0


def test_a_trainer_that_was_parked_and_comes_back_with_its_devices_is_asked_for_them():
    """Its ranks have just started again."""
    d, _ = shared("a", others="b")
    d.feed(NodeLost("t", "gone"))
    d.join("t", "trainer", incarnation=2)
    assert orders(d.join("c", shares="t", is_released=True)) == []
    assert orders(d.publish(0)) == [("t", suspend(1))]
    assert orders(parked(d, 1)) == [("c", WAKE)]


def test_if_all_others_have_vanished_engines_come_back_whatever_the_rule_says():
    d, script = shared("a", others="b", slots=4)
    later(d, script, Change(release=("a",)))
    d.finish("p0@0#0")
    released(d, "a")
    d.now += 1.0
    assert orders(d.feed(NodeLost("b", "gone"))) == [("a", WAKE)]


def test_status_knows_that_devices_take_turns():
    """None, one or two nodes that only sample."""
    d, _ = shared("a", others="b", slots=1)
    while waiting := d.running():
        d.now += 1.0
        for name in waiting:
            d.tokens(name, 9) if len(d.held(name).tokens) < 4 else d.finish(name)
    released(d, "a")
    d.now += 4.0
    parked(d)
    d.publish(1)
    d.feed(MessageArrived("t", StepDone(0, 1, {"timing_s/forward_backward": 4.0})))
    d.confirm("a", 1)
    forecast = d.core.scaling.forecast()
    assert forecast is not None
    assert (forecast.samplers, forecast.shared, forecast.leave) == (2, 1, True)
    steps_s = [forecast.step_s(n) for n in range(3)]
    assert steps_s[0] > steps_s[1] > steps_s[2]
    assert all(f.step_s for f in cost_row(d.core).forecast)
