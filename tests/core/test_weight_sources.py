"""What nodes are told of a version: sources that serve, tickets that fit, not too many messages."""

from dataclasses import replace

from lightrl.core.commands import Command, Record, Report
from lightrl.core.events import MessageArrived, NodeDraining, NodeJoined, NodeLeft, NodeLost
from lightrl.core.log_entries import VersionPublished
from lightrl.core.weights.weight_sources import MAX_PEERS, MAX_UPDATES_PER_JOIN
from lightrl.messages.nodes import PROTOCOL, Drain, Heartbeat, Hello
from lightrl.messages.training import StepDone
from lightrl.messages.weights import (
    Canary,
    DeltaOffer,
    PublishWeights,
    WeightsBase,
    WeightsEndpoint,
    WeightsFailed,
    WeightsProgress,
)
from lightrl.tickets import pull_ticket
from tests.core.conftest import Driver, endpoint_of, of_kind, publication, sent


def offers(commands: list[Command]) -> dict[str, list[str]]:
    """node -> sources in the last message that it got."""
    return {n: [s.node for s in m.sources] for n, m in sent(commands, PublishWeights)}


def late(**changes: object) -> Driver:
    """A trainer and a, both without an endpoint; version 0 is published."""
    d = Driver(**changes)
    d.opens_endpoints = False
    d.join("t", "trainer")
    d.publish(0)
    d.join("a")
    return d


def test_node_gets_addresses_and_a_ticket_that_is_good_for_it_alone(driver: Driver):
    driver.start("a")
    [(node, offer)] = sent(driver.join("b"), PublishWeights)
    assert node == "b"
    assert (offer.policy_version, offer.digest) == (0, "digest-0")
    assert (offer.num_bytes, offer.manifest_bytes) == (1000, 10)
    assert [s.node for s in offer.sources] == ["a", "t"]
    for source in offer.sources:
        endpoint = endpoint_of(source.node)
        assert source.addresses == endpoint.addresses
        assert source.ticket == pull_ticket(endpoint.secret, "b", 0)
        assert source.ticket != pull_ticket(endpoint.secret, "a", 0)


def test_endpoint_that_comes_late_is_waited_for():
    d = late()
    assert d.core.fleet.nodes["a"].state == "joining"
    assert offers(d.open("a")) == {}  # it has nothing yet
    assert offers(d.join("b")) == {}
    assert offers(d.open("t")) == {"a": ["t"], "b": ["a", "t"]}
    assert d.core.fleet.nodes["a"].state == "loading"
    assert offers(d.open("b")) == {"a": ["b", "t"]}


def test_version_that_is_published_before_the_endpoint_is_known_is_waited_for():
    d = late()
    d.open("t")
    d.confirm("a", 0)
    d.finish_round()
    d.core.fleet.sources.endpoints.pop("t")
    assert offers(d.publish(1)) == {}
    assert d.core.fleet.nodes["a"].state == "updating"
    assert offers(d.open("t")) == {"a": ["t"]}


def test_endpoint_said_again_is_no_news_and_another_one_is():
    d = late()
    d.open("t")
    assert d.open("t") == []
    [(node, offer)] = sent(d.open("t", incarnation=2), PublishWeights)
    assert (node, offer.sources[0].ticket) == ("a", pull_ticket("secret of t 2", "a", 0))


def test_endpoint_of_a_node_that_is_not_there_is_nobodys():
    d = late()
    d.feed(MessageArrived("stranger", endpoint_of("stranger")))
    assert "stranger" not in d.core.fleet.sources.endpoints
    d.open("a")
    d.feed(NodeLost("a", "gone"))
    assert "a" not in d.core.fleet.sources.endpoints


def test_fleet_that_joins_together_costs_a_few_messages_a_node():
    d, names = Driver(lease_s=1e9), [f"n{i}" for i in range(64)]
    d.join("t", "trainer")
    d.publish(0)
    sent_to = [offers(d.join(name)) for name in names]
    assert sum(map(len, sent_to)) <= (1 + MAX_UPDATES_PER_JOIN) * len(names)
    last = {name: sources for each in sent_to for name, sources in each.items()}
    assert set(last) == set(names)
    assert all(sources[-1] == "t" for sources in last.values())
    assert all(len(sources) > MAX_UPDATES_PER_JOIN for sources in last.values())


def test_version_goes_to_all_in_one_message_each_and_everybody_serves_as_many():
    d, names = Driver(lease_s=1e9, prompts_per_step=1), [f"n{i}" for i in range(64)]
    d.start(*names)
    d.finish_round()
    commands = d.publish(1)
    assert len(sent(commands, PublishWeights)) == 64
    told = offers(commands)
    assert all(len(sources) == MAX_PEERS + 1 for sources in told.values())
    assert {sum(n in sources for sources in told.values()) for n in names} == {MAX_PEERS}


def test_who_has_the_version_is_asked_before_who_is_at_it(driver: Driver):
    driver.start("a", "b", "c")
    driver.join("d")
    assert offers(driver.join("e"))["e"][-2:] == ["d", "t"]


def test_draining_node_that_has_the_version_serves_until_it_is_gone(driver: Driver):
    driver.start("a")
    driver.feed(NodeDraining("a", "SIGTERM"))
    assert offers(driver.join("b")) == {"b": ["a", "t"]}
    driver.feed(NodeLost("a", "gone"))
    assert offers(driver.join("c"))["c"] == ["b", "t"]


def test_draining_node_that_was_still_at_it_serves_no_more(driver: Driver):
    driver.start()
    driver.join("a")
    driver.feed(NodeDraining("a", "SIGTERM"))
    assert offers(driver.join("b")) == {"b": ["t"]}


def test_node_without_the_sources_that_it_was_sent_gets_others():
    d, names = Driver(lease_s=1e9), [f"n{i}" for i in range(MAX_PEERS + 4)]
    d.start(*names)
    d.feed(NodeLost("t", "gone"))
    told = offers(d.join("late"))["late"]
    others = set(names) - set(told)
    assert len(others) == 4
    commands = [[*d.feed(NodeLost(n, "gone"))] for n in told]
    assert not any(map(offers, commands[:-1]))
    assert set(offers(commands[-1])["late"]) == others


def test_node_that_trains_and_generates_is_told_and_never_to_pull_from_itself():
    d = Driver()
    both = Hello("t", 1, ("trainer", "rollout"), PROTOCOL, pid=1, host="h", slots=4)
    d.feed(NodeJoined(both))
    d.open("t")
    assert offers(d.publish(0)) == {"t": []}  # it has the version itself
    assert d.core.fleet.nodes["t"].state == "loading"
    assert offers(d.join("a")) == {"a": ["t"], "t": ["a"]}
    d.confirm("t", 0)
    assert offers(d.join("b"))["b"] == ["a", "t"]  # once, and last


# Without the trainer


def test_who_comes_while_the_trainer_is_away_pulls_from_those_who_have_it():
    d = Driver()
    d.start("a")
    d.feed(NodeLost("t", "gone"))
    assert offers(d.join("b")) == {"b": ["a"]}
    d.confirm("b", 0)
    assert d.core.fleet.nodes["b"].state == "ready"


def test_who_comes_while_nobody_has_it_waits_for_the_trainer():
    d = Driver()
    d.start()
    d.join("a")
    d.feed(NodeLost("t", "gone"))
    d.feed(NodeLost("a", "gone"))
    assert offers(d.join("b")) == {}
    assert d.core.fleet.nodes["b"].state == "joining"
    d.join("t", "trainer", incarnation=2)
    assert offers(d.publish(0)) == {"b": ["t"]}


def test_trainer_that_is_behind_is_no_source():
    d = Driver(num_steps=3)
    d.start("a")
    d.finish_round()
    d.next_step()
    d.join("t", "trainer")  # its ranks have started again
    d.publish(0)  # from its checkpoint
    assert offers(d.join("b")) == {"b": ["a"]}
    assert offers(d.publish(1)) == {"b": ["a", "t"]}


def test_engine_that_died_loads_what_its_node_has_while_nobody_else_is_there():
    d = Driver()
    d.start("a")
    d.feed(NodeLost("t", "gone"))
    commands = d.feed(MessageArrived("a", WeightsFailed(0, "killed")))
    assert offers(commands) == {"a": []}
    assert offers(d.join("b", serves=0)) == {"a": ["b"]}


def test_node_that_cannot_pull_while_the_trainer_is_away_is_not_sent_away():
    d = Driver()
    d.start("a")
    d.feed(NodeLost("t", "gone"))
    d.join("b")
    commands = [
        c for _ in range(5) for c in d.feed(MessageArrived("b", WeightsFailed(0, "no route")))
    ]
    assert sent(commands, Drain) == []
    assert len(sent(commands, PublishWeights)) == 2
    d.join("t", "trainer", incarnation=2)
    assert offers(d.publish(0))["b"] == ["a", "t"]


def test_resumed_coordinator_knows_enough_for_nodes_to_pull_from_each_other():
    d = Driver()
    canary = Canary(b"\1\0\0\0\2\0\0\0", b"\0\0\0\0")
    d.join("t", "trainer")
    base = WeightsBase("base", 5000, 50)
    message = PublishWeights(0, "digest-0", 1000, 10, canary=canary, base=base)
    [entry] = [
        c.entry
        for c in of_kind(d.feed(MessageArrived("t", message)), Record)
        if isinstance(c.entry, VersionPublished)
    ]
    assert (entry.num_bytes, entry.manifest_bytes, entry.canary) == (1000, 10, canary)
    assert entry.base == base
    d.join("a")
    d.confirm("a", 0)
    for _ in range(2):  # from the entry; then from where the segment begins
        d.restart()
        assert offers(d.join("a", serves=0)) == {}
        [(node, offer)] = sent(d.join("b"), PublishWeights)
        assert (node, [s.node for s in offer.sources]) == ("b", ["a"])
        assert (offer.num_bytes, offer.manifest_bytes, offer.canary) == (1000, 10, canary)
        assert offer.base is not None
        assert replace(offer.base, sources=()) == base
        assert [s.node for s in offer.base.sources] == ["a"]


def test_the_base_of_adapters_is_pulled_with_tickets_that_hold_for_every_version():
    d = Driver()
    d.join("t", "trainer")
    message = replace(publication(0), base=WeightsBase("base", 5000, 50))
    d.feed(MessageArrived("t", message))
    [(_, offer)] = sent(d.join("a"), PublishWeights)
    assert offer.base is not None
    secret = d.core.fleet.sources.endpoints["t"].secret
    assert [s.ticket for s in offer.base.sources] == [pull_ticket(secret, "a", 0)]
    assert offer.base.sources == offer.sources


def test_coordinator_resumed_while_nodes_pull_tells_them_again():
    d = Driver()
    d.start()
    d.join("a")
    d.join("b")
    d.restart()
    assert offers(d.join("a")) == offers(d.join("b")) == {}  # nobody is known to have any of it
    d.join("t", "trainer")
    told = offers(d.publish(0))
    assert set(told) == {"a", "b"}
    assert all(sources[-1] == "t" for sources in told.values())


def test_version_that_is_overtaken_is_not_asked_for_and_not_counted():
    d = Driver(num_steps=5, max_staleness=1, prompts_per_step=1, group_size=1)
    d.start("a", "b")
    d.finish_round()
    first = offers(d.train(0))
    d.finish_round()
    second = offers(d.train(1))
    assert first == second == {"a": ["b", "t"], "b": ["a", "t"]}
    d.confirm("a", 1)  # it had loaded it when it heard of the other one
    assert d.core.fleet.nodes["a"].state == "updating"
    assert bad(d, "b", "a", version=1) == []
    d.confirm("a", 2)
    assert offers(d.join("c"))["c"] == ["a", "b", "t"]


def test_source_that_drains_serves_until_it_is_gone():
    d = Driver()
    d.start("a")
    d.feed(NodeLost("t", "gone"))
    d.join("b")
    d.join("c")  # gets a and b
    d.feed(NodeDraining("b", "SIGTERM"))  # it has not all of the version
    assert d.core.fleet.sources.assigned["c"] == {"a"}
    d.feed(NodeDraining("a", "SIGTERM"))
    assert d.core.fleet.sources.assigned["c"] == {"a"}
    d.feed(NodeLeft("b", "drained", ok=True))
    d.feed(NodeLeft("a", "drained", ok=True))
    assert d.core.fleet.sources.waiting == ["c"]
    assert offers(d.join("d", serves=0)) == {"c": ["d"]}


# Wrong bytes


def bad(d: Driver, reporter: str, source: str, version: int = 0) -> list[Command]:
    return d.feed(
        MessageArrived(reporter, WeightsFailed(version, "bucket 7: digest differs", source))
    )


def test_wrong_bytes_are_counted_and_cost_a_warning(driver: Driver):
    driver.start("a", "b")
    driver.join("c")
    [warning] = of_kind(bad(driver, "c", "a"), Report)
    assert warning.is_warning
    assert warning.text.startswith("c: wrong bytes of version 0 from a")
    assert driver.core.fleet.num_bad_sources == 1


def test_only_who_was_told_of_a_source_can_report_it(driver: Driver):
    driver.start("a", "b")
    driver.join("c")
    assert bad(driver, "a", "b") == []  # it does not pull
    assert bad(driver, "c", "a", version=7) == []
    assert bad(driver, "c", "stranger") == []
    assert bad(driver, "c", "c") == []
    assert bad(driver, "stranger", "a") == []
    assert driver.core.fleet.num_bad_sources == 0


# Differences


def delta(base: int, target: int, num_bytes: int = 10) -> DeltaOffer:
    return DeltaOffer(f"digest-{base}", f"digest-{target}", f"delta-{target}", 1, num_bytes)


def publish(d: Driver, version: int, *deltas: DeltaOffer) -> dict[str, tuple[DeltaOffer, ...]]:
    """node -> the differences that it was told of."""
    p = publication(version)
    message = PublishWeights(version, p.digest, p.num_bytes, p.manifest_bytes, deltas=deltas)
    commands = d.feed(MessageArrived("t", message))
    return {n: m.deltas for n, m in sent(commands, PublishWeights)}


def step(d: Driver, version: int, *deltas: DeltaOffer) -> dict[str, tuple[DeltaOffer, ...]]:
    d.finish_round()
    got = publish(d, version, *deltas)
    d.feed(MessageArrived("t", StepDone(version - 1, version, {})))
    for name in list(d.core.fleet.updating):
        if name != "slow":
            d.confirm(name, version)
    return got


def test_node_is_told_of_the_differences_to_what_it_holds():
    d = Driver(num_steps=5)
    d.start("a", "slow")
    assert step(d, 1, delta(0, 1)) == dict.fromkeys(["a", "slow"], (delta(0, 1),))
    got = step(d, 2, delta(1, 2))  # slow is not at it yet
    assert got == {"a": (delta(1, 2),), "slow": (delta(0, 1), delta(1, 2))}
    joined = {n: m.deltas for n, m in sent(d.join("new"), PublishWeights)}
    assert joined["new"] == ()
    got = step(d, 3, delta(2, 3))
    assert got["new"] == ()  # what it has begun to pull is no base
    assert "new" not in publish(d, 3)


def test_node_that_comes_back_with_an_older_version_gets_the_differences():
    d = Driver(num_steps=5)
    d.start("a", "b")
    d.feed(NodeLost("b", "gone"))
    step(d, 1, delta(0, 1))
    [(_, offer)] = sent(d.join("b", incarnation=2, serves=0), PublishWeights)
    assert offer.deltas == (delta(0, 1),)


def test_no_differences_where_they_do_not_pay_or_are_switched_off():
    d = Driver(num_steps=5)
    d.start("a")
    assert step(d, 1, delta(0, 1, 900)) == {"a": ()}
    d = Driver(num_steps=5, deltas=False)
    d.start("a")
    assert step(d, 1, delta(0, 1)) == {"a": ()}


# What is seen


def test_progress_of_a_pull_is_known_until_the_node_is_ready(driver: Driver):
    driver.start("a")
    driver.join("b")
    progress = WeightsProgress(0, 500, 1000, 2)
    driver.feed(MessageArrived("b", Heartbeat(weights=progress)))
    assert driver.core.fleet.nodes["b"].weights == progress
    driver.confirm("b", 0)
    assert driver.core.fleet.nodes["b"].weights is None


def test_endpoints_that_change_all_the_time_cost_others_nothing():
    d = Driver(lease_s=1e9)
    d.start(*[f"n{i}" for i in range(4)])
    for i in range(30):
        d.join(f"late-{i}")
    for k in range(20):
        changed = MessageArrived("late-3", WeightsEndpoint(("h:1",), f"{k}" * 16))
        assert not sent(d.feed(changed), PublishWeights)


def test_differences_that_are_found_later_are_told_to_those_who_are_at_it_and_have_the_base():
    d = Driver(num_steps=5)
    d.start("a", "slow")
    step(d, 1)
    assert publish(d, 1, delta(0, 1)) == {"slow": (delta(0, 1),)}  # a has it already
    assert publish(d, 1, delta(0, 1)) == {}  # that is no news
    assert publish(d, 1, delta(0, 2)) == {}
    d.join("new")
    assert publish(d, 1, delta(0, 1, 9)) == {"slow": (delta(0, 1, 9),)}
    d = Driver(num_steps=5, deltas=False)
    d.start("a")
    d.finish_round()
    publish(d, 1)
    assert publish(d, 1, delta(0, 1)) == {}
