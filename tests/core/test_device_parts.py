"""Parts of the devices change sides by themselves: which of them the ranks are told that they have,
and when."""

import pytest

from lightrl.core.commands import Command, Send
from lightrl.core.events import MessageArrived, NodeLeft, NodeLost
from lightrl.core.sharing.shared_devices import SharedDevices
from lightrl.core.sharing.sharing_rules import Change, half_of
from lightrl.messages.nodes import Welcome
from lightrl.messages.responses import Generate
from lightrl.messages.sharing import SetDevices
from lightrl.messages.training import StepDone, TrainShard
from tests.core.conftest import SLEEP, WAKE, Driver, assign, order_of, sent, suspend
from tests.core.test_handover import Script, later, parked, released, state

ORDERS = SetDevices | TrainShard


def orders(commands: list[Command]) -> list[tuple[str, object]]:
    """Of releases and shards the kind alone."""
    told = [c for c in commands if isinstance(c, Send) and isinstance(c.message, ORDERS)]
    return [(c.node, order_of(c.message)) for c in told]


def in_parts(
    parts: dict[str, int], others: str = "", num_parts: int = 2, **changes: object
) -> tuple[Driver, Script]:
    """A run at version 0 whose nodes use these parts of the trainer's devices."""
    d = Driver(**{"num_steps": 9, "device_parts": num_parts, "slots": 4, **changes})
    d.core.policy.rule = script = Script()
    d.join("t", "trainer", is_released=True)
    d.publish(0)
    for name, part in parts.items():
        d.join(name, shares="t", part=part, is_released=True)
    for name in others:
        d.join(name)
    for name in (*parts, *others):
        d.confirm(name, 0)
    return d, script


def release(d: Driver, script: Script, *names: str) -> list[Command]:
    """Within the round: the rule says so when the next response has ended."""
    later(d, script, Change(release=names))
    return d.finish(d.running()[0])


def test_half_of_the_devices_train_while_the_other_half_samples():
    d, script = in_parts({"a": 0, "b": 1})
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    later(d, script, Change(release=("b",)))
    assert orders(d.finish("p1@0#0")) == [("b", SLEEP)]
    assert orders(released(d, "b")) == [
        ("t", assign(0, (1,))),
        ("t", TrainShard),
    ]
    assert d.core.fleet.devices.share_free == 0.5
    assert state(d, "a") == "ready"
    commands = d.finish_round()
    assert orders(commands) == [("t", TrainShard), ("t", TrainShard), ("a", SLEEP)]
    assert orders(released(d, "a")) == [("t", assign(0, (0, 1)))]
    assert orders(parked(d)) == []
    assert orders(d.publish(1)) == [("a", WAKE), ("b", WAKE)]
    d.feed(MessageArrived("t", StepDone(0, 1, {})))
    d.confirm("a", 1)
    d.confirm("b", 1)
    d.finish_round()
    assert orders(released(d, "b")) == [
        ("t", assign(1, (1,))),
        ("t", TrainShard),
    ]


def test_what_is_parked_within_a_step_goes_on_with_the_parts_that_are_left():
    """One part is taken back: all park, and the other part is given again without a new shard."""
    d, script = in_parts({"a": 0, "b": 1, "c": 2}, num_parts=3)
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    later(d, script, Change(release=("a", "b")))
    d.finish("p1@0#0")
    released(d, "a")
    assert orders(released(d, "b")) == [("t", assign(0, (0, 1)))]
    d.core.policy.on_lost("a")  # whoever decides so
    assert orders(d.feed(NodeLost("nobody", "gone"))) == [("t", suspend(1))]
    assert orders(parked(d, 1)) == [("a", WAKE), ("t", assign(0, (1,)))]
    d.confirm("a", 0)
    assert d.core.fleet.devices.given == {1}


def test_a_step_that_is_over_gets_no_devices():
    d, _ = in_parts({"a": 0, "b": 1})
    d.finish_round()
    released(d, "a")
    released(d, "b")
    assert d.core.fleet.devices.given == {0, 1}
    assert orders(parked(d)) == []
    assert d.core.fleet.devices.given == set()
    assert [kind for _, kind in orders(d.publish(1))] == [WAKE, WAKE]


def test_a_part_whose_engine_is_gone_is_given_at_once():
    d, _ = in_parts({"a": 0, "b": 1})
    d.finish("p0@0#0")
    assert orders(d.finish("p0@0#1")) == []
    commands = d.feed(NodeLeft("b", "its devices only train", ok=True))
    assert orders(commands) == [("t", assign(0, (1,))), ("t", TrainShard)]
    view = d.core.policy.view(d.round, d.core.policy.rest(d.round))
    assert view.unused == 0.5
    assert orders(d.finish_round()) == [("t", TrainShard), ("t", TrainShard), ("a", SLEEP)]
    assert orders(released(d, "a")) == [("t", assign(0, (0, 1)))]


def test_a_part_that_no_engine_uses_trains_all_the_time():
    d, _ = in_parts({"a": 1}, others="c")
    d.finish("p0@0#0")
    assert orders(d.finish("p0@0#1")) == [
        ("t", assign(0, (0,))),
        ("t", TrainShard),
    ]
    commands = d.finish_round()
    assert orders(commands) == [("t", TrainShard), ("t", TrainShard), ("a", SLEEP)]
    assert orders(released(d, "a")) == [("t", assign(0, (0, 1)))]


def test_all_parts_are_given_when_the_last_engine_that_uses_one_is_gone():
    d, script = in_parts({"a": 0, "b": 1}, others="c")
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    release(d, script, "b")
    released(d, "b")
    d.feed(NodeLost("b", "gone"))
    assert orders(d.feed(NodeLost("a", "gone"))) == [("t", assign(0, (0, 1)))]
    assert d.core.fleet.devices.nodes == {}


def test_an_engine_that_is_awake_on_a_given_part_by_its_own_word_has_the_ranks_park():
    d, script = in_parts({"a": 0, "b": 1})
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    release(d, script, "b")
    released(d, "b")
    commands = d.join("b", shares="t", part=1, incarnation=2)
    assert orders(commands) == [("b", SLEEP), ("t", suspend(1))]
    assert not d.core.fleet.devices.may_train
    assert "t" not in [n for n, m in orders(parked(d, 1)) if isinstance(m, SetDevices)]


def test_a_part_is_free_when_all_that_use_it_sleep():
    d, script = in_parts({"a": 0, "b": 0, "c": 1, "e": 1})
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    release(d, script, "c", "e")
    assert orders(released(d, "c")) == []
    assert orders(released(d, "e")) == [
        ("t", assign(0, (1,))),
        ("t", TrainShard),
    ]


def test_rules_release_whole_parts():
    d, _ = in_parts({"a": 0, "b": 1, "c": 1, "e": 1})
    view = d.core.policy.view(d.round, d.core.policy.rest(d.round))
    assert [node.name for node in view.emptiest(2)] == ["a"]
    assert [node.name for node in view.emptiest(3)] in (["a"], ["b", "c", "e"])
    assert {node.name for node in view.emptiest(4)} == set("abce")
    view.finished = 0.3
    assert [node.name for node in half_of(view)] == ["a"]


def test_parts_of_several_trainer_nodes_are_numbered_as_their_ranks_are():
    """Those of the node that leads come first, whatever its name is."""
    d = Driver(num_trainers=2, num_steps=9, device_parts=4)
    d.core.policy.rule = Script()
    d.join("u", "trainer", leads=True, is_released=True)
    d.join("t", "trainer", is_released=True)
    d.publish(0, "u")
    for name, trainer, part in (("a", "t", 1), ("b", "u", 0)):
        d.join(name, shares=trainer, part=part, is_released=True)
        d.confirm(name, 0)
    devices = d.core.fleet.devices
    assert devices.free == {1, 2}
    assert devices.share_free == devices.share_unused == 0.5
    d.finish("p0@0#0")
    assert orders(d.finish("p0@0#1")) == [
        ("u", assign(0, (1, 2))),
        ("u", TrainShard),
    ]
    d.finish_round()
    assert orders(released(d, "a")) == [("u", assign(0, (1, 2, 3)))]
    d.feed(NodeLost("t", "gone"))
    assert devices.free == set()
    assert not devices.is_trespassed


def test_the_trainer_node_that_leads_is_asked_first():
    """What it has told the ranks of others has come to them before they are asked."""
    d = Driver(num_trainers=2, num_steps=9, device_parts=2)
    d.core.policy.rule = script = Script()
    d.join("t", "trainer", is_released=True)
    d.join("u", "trainer", is_released=True)
    d.publish(0)
    for name, trainer in (("a", "t"), ("b", "u")):
        d.join(name, shares=trainer, is_released=True)
        d.confirm(name, 0)
    d.join("c")
    d.confirm("c", 0)
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    later(d, script, Change(release=("b",)))
    d.finish("p1@0#0")
    assert orders(released(d, "b")) == [
        ("t", assign(0, (1,))),
        ("t", TrainShard),
    ]
    later(d, script, Change(take_back=("b",)))
    assert orders(d.feed(NodeLost("c", "gone"))) == [("t", suspend(1))]
    assert orders(parked(d, 1)) == [("u", suspend(2))]
    assert orders(parked(d, 2, "u")) == [("b", WAKE)]


def test_the_node_that_leads_is_asked_also_if_no_engine_uses_its_devices():
    """It orders the ranks of the others to park."""
    d = Driver(num_trainers=2, num_steps=9)
    d.core.policy.rule = script = Script()
    d.join("t", "trainer", is_released=True)
    d.join("u", "trainer", is_released=True)
    d.publish(0)
    d.join("a", shares="u", is_released=True)
    d.join("b")
    d.confirm("a", 0)
    d.confirm("b", 0)
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    later(d, script, Change(release=("a",)))
    d.finish("p1@0#0")
    assert orders(released(d, "a")) == [("t", TrainShard)]
    later(d, script, Change(take_back=("a",)))
    assert orders(d.feed(NodeLost("b", "gone"))) == [("t", suspend(1))]
    assert orders(parked(d, 1)) == [("u", suspend(2))]
    assert orders(parked(d, 2, "u")) == [("a", WAKE)]


def test_a_trainer_that_says_hello_again_has_been_given_nothing():
    d, script = in_parts({"a": 0, "b": 1})
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    release(d, script, "b")
    released(d, "b")
    commands = d.join("t", "trainer", incarnation=2, is_released=True)
    assert sent(commands, SetDevices) == []
    assert d.core.fleet.devices.given == set()
    assert orders(d.publish(0)) == [("t", assign(0, (1,))), ("t", TrainShard)]


def test_a_run_that_is_stopped_gives_what_its_last_step_needs():
    """Its groups were all sent; nodes that leave free their devices."""
    d, script = in_parts({"a": 0, "b": 1})
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    release(d, script, "b")
    released(d, "b")
    d.finish_round()
    assert d.core.fleet.devices.given == {1}
    d.core.shutdown.begin(d.core.state.__class__.STOPPED, "enough")
    commands = d.feed(NodeLeft("a", "enough", ok=True))
    assert orders(commands) == [("t", assign(0, (0, 1)))]


@pytest.mark.parametrize(
    ("num_parts", "part", "why"),
    [
        (2, 2, "uses part 2 of the devices of t, which has parts 0 to 1"),
        (1, 1, "uses part 1 of the devices of t, which change sides as a whole"),
    ],
)
def test_a_part_that_there_is_not_is_refused(num_parts: int, part: int, why: str):
    d, _ = in_parts({}, num_parts=num_parts)
    [(_, refusal)] = sent(d.join("a", shares="t", part=part), Welcome)
    assert refusal.refused == why


def test_who_changes_sides_as_a_whole_is_told_nothing_of_parts():
    d, _ = in_parts({"a": 0, "b": 0}, num_parts=1)
    d.finish_round()
    released(d, "a")
    assert orders(released(d, "b")) == [("t", TrainShard)]
    assert isinstance(d.core.fleet.devices, SharedDevices)


def test_what_waits_at_ranks_that_get_their_part_later_loses_nothing():
    d, script = in_parts({"a": 0, "b": 1}, others="c")
    d.finish("p0@0#0")
    d.finish("p0@0#1")
    release(d, script, "b")
    released(d, "b")
    moved = [
        r.response for _, m in sent(d.feed(NodeLost("c", "gone")), Generate) for r in m.requests
    ]
    assert set(moved) <= set(d.running())
    d.finish_round()
    assert orders(released(d, "a")) == [("t", assign(0, (0, 1)))]
