"""Engines of several sizes over the same devices: which are awake, and which orders nodes get."""

from typing import Any

from lightrl.core.commands import Command, Report
from lightrl.core.events import MessageArrived, NodeLeft, NodeLost, TimerFired
from lightrl.core.settings import Tail
from lightrl.messages.load import Load, StepCosts
from lightrl.messages.nodes import Heartbeat, Welcome
from lightrl.messages.responses import Generate
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.weights import PublishWeights
from tests.core.conftest import SLEEP, WAKE, Driver, of_kind, order_of, sent

SIZES = {"a": 1, "b": 1, "big": 2}


def sized(**changes: Any) -> Driver:
    """A run at version 0 with two engines of one device, and one of both; the small ones serve."""
    d = Driver(**{"num_steps": 99, "release_s": 20.0, "parallel": (1, 2), **changes})
    d.join("t", "trainer")
    d.publish(0)
    for name, size in SIZES.items():
        d.join(name, slots=4 * size, parallel=size, is_released=True)
    for name in ("a", "b"):
        d.confirm(name, 0)
    return d


def heartbeat(d: Driver, name: str, num_preemptions: int = 0, kv_tokens: int = 0) -> list[Command]:
    load = Load(num_preemptions=num_preemptions, kv_tokens=kv_tokens)
    return d.feed(MessageArrived(name, Heartbeat(load, device="cpu")))


def all_heartbeats(d: Driver, num_preemptions: int = 0, kv_tokens: int = 0) -> list[Command]:
    """Heartbeats of the ready nodes: one has had all preemptions since it started."""
    ready = list(d.core.fleet.ready)
    counts = [num_preemptions, *[0] * len(ready)]
    return [
        c
        for n, count in zip(ready, counts, strict=False)
        for c in heartbeat(d, n, count, kv_tokens)
    ]


def released(d: Driver, name: str) -> list[Command]:
    order = d.core.fleet.nodes[name].order
    return d.feed(MessageArrived(name, DevicesReleased("rollout", order, 0, 0.5)))


def orders(commands: list[Command]) -> list[tuple[str, object]]:
    told = sorted(sent(commands, SetDevices), key=lambda order: order[1].active)
    return [(n, order_of(m)) for n, m in told]


def states(d: Driver) -> dict[str, str]:
    return {
        name: str(d.core.fleet.nodes[name].state) for name in SIZES if name in d.core.fleet.nodes
    }


def round_with(d: Driver, num_preemptions: int, kv_tokens: int = 0) -> list[Command]:
    """Return the commands of the end of the current round."""
    d.now += 10.0
    all_heartbeats(d, num_preemptions, kv_tokens)
    return d.finish_round()


def test_engines_of_the_first_size_wake_and_the_others_sleep():
    d = sized()
    assert states(d) == {"a": "ready", "b": "ready", "big": "released"}
    assert {n for n, _ in d.requests.values()} == {"a", "b"}


def test_the_size_changes_while_the_trainer_works():
    d = sized()
    commands = round_with(d, num_preemptions=3)
    assert orders(commands) == [("a", SLEEP), ("b", SLEEP)]
    assert orders(released(d, "a")) == []
    assert orders(released(d, "b")) == [("big", WAKE)]
    assert orders(d.publish(1)) == []
    assert sent(d.confirm("big", 1), Generate) == []
    commands = d.train(0)
    assert {n for n, _ in sent(commands, Generate)} == {"big"}
    assert states(d) == {"a": "released", "b": "released", "big": "ready"}


def test_who_sleeps_pulls_the_version():
    d = sized()
    d.finish_round()
    assert {n for n, _ in sent(d.publish(1), PublishWeights)} == {"a", "b", "big"}
    assert states(d)["big"] == "released"


def test_kinds_change_places():
    """Long rounds preempt, short ones do not."""
    d = sized(prompts_per_step=2, tail=Tail(eta_prompts=2.0), max_response_tokens=40)
    seen: list[tuple[str, int]] = []
    for _ in range(8):
        kind = d.round.kind
        seen.append((kind, d.core.sizes.size))
        d.now += 10.0
        all_heartbeats(d, num_preemptions=9 if kind == "long" and d.core.sizes.size == 1 else 0)
        d.complete(lambda name: 30 if int(name[1:].split("@")[0]) % 4 > 1 else 2)
        follow(d)
        d.next_step()
        follow(d)
        for name in SIZES:
            d.confirm(name, d.core.fleet.published.policy_version)  # type: ignore[union-attr]
    short = [size for kind, size in seen if kind == "short"]
    assert short == [1, 1, 1, 1]
    assert [size for kind, size in seen if kind == "long"][:3] == [1, 2, 2]


def follow(d: Driver) -> None:
    """All that are ordered to sleep do."""
    for name in SIZES:
        if d.core.fleet.nodes[name].state == "releasing":
            released(d, name)


def test_what_a_round_held_at_once_is_added_up():
    d = sized()
    for name in d.running():
        d.tokens(name, 5, 6, 7)
    all_heartbeats(d, kv_tokens=8)
    d.finish_round()
    assert d.core.sizes.planner.memory().caches == {1: 16}
    held = d.core.sizes.planner.memory().kinds["plain"].kv_tokens
    assert 4 * 3 < held <= 4 * (3 + 4)  # every few chunks somebody looks
    assert d.core.sizes.size == 2  # it does not fit: nobody waits until it preempts


def test_a_node_that_does_not_let_go_is_lost():
    d = sized(lease_s=1e9)
    round_with(d, num_preemptions=3)
    released(d, "a")
    assert d.core.next_deadline() == d.now + 20.0
    d.now += 20.0
    assert orders(d.feed(TimerFired())) == [("big", WAKE)]
    assert "b" not in d.core.fleet.nodes


def test_others_take_over_if_none_of_the_size_is_left():
    d = sized(lease_s=1e9)
    for name in ("a", "b"):
        d.feed(NodeLost(name, "gone"))
    assert states(d)["big"] == "released"  # they may come back
    assert d.core.next_deadline() == d.now + 20.0
    d.now += 20.0
    commands = d.feed(TimerFired())
    assert orders(commands) == [("big", WAKE)]
    assert any("no engine of 1 devices" in c.text for c in of_kind(commands, Report))
    assert len(sent(d.confirm("big", 0), Generate)) > 0
    d.join("a", slots=4, parallel=1, is_released=True)
    assert states(d)["a"] == "released"


def test_a_size_that_nobody_has_is_not_waited_for():
    d = sized()
    d.feed(NodeLost("big", "gone"))
    assert orders(round_with(d, num_preemptions=3)) == []
    assert {n for n, _ in sent(d.next_step(), Generate)} == {"a", "b"}


def test_one_that_comes_awake_is_put_to_sleep():
    d = sized()
    d.feed(NodeLeft("big", "restart", ok=True))
    commands = d.join("big", slots=8, incarnation=2, parallel=2, is_released=False)
    assert orders(commands) == [("big", SLEEP)]
    released(d, "big")
    assert states(d) == {"a": "ready", "b": "ready", "big": "released"}


def test_nodes_that_take_no_turns_go_on():
    d = sized()
    d.join("c")
    d.confirm("c", 0)
    assert orders(round_with(d, num_preemptions=3)) == [("a", SLEEP), ("b", SLEEP)]
    assert str(d.core.fleet.nodes["c"].state) == "ready"


def test_a_size_that_is_not_of_this_run_is_refused():
    d = sized()
    [(_, welcome)] = sent(d.join("d", parallel=4, is_released=True), Welcome)
    assert welcome.refused == "has an engine of 4 devices; such that take turns here: 1, 2"


def test_a_coordinator_that_was_started_again_starts_no_engine_that_sleeps():
    d = sized()
    assert orders([c for n in SIZES for c in heartbeat(d, n)]) == []
    d.restart()
    d.join("t", "trainer")
    d.publish(0)
    for name in SIZES:
        serves = 0 if name != "big" else None
        is_released = name == "big"
        d.join(name, slots=4, parallel=SIZES[name], is_released=is_released, serves=serves)
    assert orders([c for n in SIZES for c in heartbeat(d, n)]) == []
    assert states(d) == {"a": "ready", "b": "ready", "big": "released"}


def test_what_was_learned_and_the_size_outlive_the_coordinator():
    d = sized()
    round_with(d, num_preemptions=3)
    for name in ("a", "b"):
        released(d, name)
    d.train(0)
    d.confirm("big", 1)
    before = d.core.sizes.memory()
    assert before.size == 2
    d.restart()
    assert d.core.sizes.memory() == before


def test_engines_over_the_devices_of_smaller_ones_are_not_paid_for_again():
    d = sized()
    assert d.core.scaling.num_reserved == 3  # the trainer, a and b


def test_what_a_size_preempted_before_it_slept_is_of_no_later_round():
    d = sized()
    round_with(d, num_preemptions=3)
    for name in ("a", "b"):
        released(d, name)
    d.train(0)
    d.publish(1)
    d.confirm("big", 1)
    heartbeat(d, "big")
    heartbeat(d, "a", 9)
    round_with(d, num_preemptions=0)
    assert d.core.sizes.planner.memory().kinds["plain"].preemptions == 0


def empty_heartbeats(d: Driver, *names: str, device: str = "") -> list[Command]:
    """Heartbeats, by default of nodes whose engines have never been up."""
    return [c for n in names for c in d.feed(MessageArrived(n, Heartbeat(device=device)))]


def sizes_of_three(**changes: Any) -> Driver:
    d = Driver(**{"num_steps": 99, "parallel": (1, 2, 4), "lease_s": 1e9, **changes})
    d.join("t", "trainer")
    for name, size in {"a": 1, "b": 1, "big": 2, "all": 4}.items():
        d.join(name, slots=4 * size, parallel=size, is_released=True)
    return d


def test_engines_of_each_size_start_once_while_nothing_is_sampled_the_largest_first():
    d = sizes_of_three()  # the trainer has not published yet
    assert orders(empty_heartbeats(d, "a", "b", "big")) == [
        *[("a", SLEEP), ("b", SLEEP)],  # they had begun to start
    ]
    assert orders(empty_heartbeats(d, "all")) == []
    assert orders(released(d, "a")) == []
    assert orders(released(d, "b")) == [("all", SLEEP), ("all", WAKE)]
    assert orders(released(d, "all")) == [("big", SLEEP), ("big", WAKE)]
    assert orders(released(d, "big")) == [("a", WAKE), ("b", WAKE)]
    assert {n for n, _ in sent(d.publish(0), PublishWeights)} == {"a", "b", "big", "all"}
    commands = d.confirm("a", 0) + d.confirm("b", 0)
    assert {n for n, _ in sent(commands, Generate)} == {"a", "b"}
    assert orders(empty_heartbeats(d, "a", "b", "big", "all", device="cpu")) == []


def test_who_comes_while_others_sample_starts_its_engine_after_the_round():
    d = sizes_of_three(group_size=1)
    d.publish(0)
    for name in ("a", "b"):
        d.confirm(name, 0)
    assert orders(empty_heartbeats(d, "big", "all")) == []
    commands = round_with(d, num_preemptions=0)
    assert orders(commands) == [("a", SLEEP), ("b", SLEEP)]
    released(d, "a")
    assert orders(released(d, "b")) == [("all", SLEEP), ("all", WAKE)]


def test_one_whose_engine_does_not_come_up_is_not_ordered_to_start_it_again():
    d = sizes_of_three()
    for name in ("a", "b"):
        released(d, name)
    empty_heartbeats(d, "all")
    for name in ("a", "b"):
        released(d, name)
    limit = d.core.settings.release_s + d.core.settings.patience_s  # it starts before it sleeps
    assert d.core.next_deadline() == d.now + limit
    assert orders(released(d, "all")) == [("a", WAKE), ("b", WAKE)]
    assert orders(empty_heartbeats(d, "all", "all")) == []


def costs(d: Driver, **base_s: float) -> None:
    """Each says what its steps cost, and that its engine is up."""
    for name, seconds in base_s.items():
        load = Load(kv_tokens=1000, costs=StepCosts(seconds, seconds / 100))
        d.feed(MessageArrived(name, Heartbeat(load, device="cpu")))


def test_the_first_round_begins_with_the_size_that_is_fastest_by_its_costs():
    d = sizes_of_three(parallel=(1, 2), lease_s=1e9)
    for name in ("a", "b"):
        released(d, name)
    costs(d, a=0.03, b=0.03, big=0.01)
    assert d.core.sizes.size == 2
    slow = sizes_of_three(parallel=(1, 2), lease_s=1e9)
    costs(slow, a=0.01, b=0.01, big=0.03)
    assert slow.core.sizes.size == 1
