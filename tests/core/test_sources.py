"""The choice of sources, and which deltas lead where."""

from collections import Counter
from dataclasses import replace

import pytest

from lightrl.core.events import MessageArrived
from lightrl.core.weights.weight_sources import (
    MAX_CHAIN,
    MAX_PEERS,
    WeightSources,
    choose,
    delta_chain,
)
from lightrl.messages.nodes import Heartbeat
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsProgress
from tests.core.conftest import SETTINGS, Driver, publication, sent


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def assigned(index: int, ring: list[str]) -> tuple[str, ...]:
    """To a member of the ring of those who are at it; nobody has it but the trainer."""
    return choose(index, [], ring, "t", {ring[index]})


def test_who_has_it_comes_before_who_is_at_it_and_the_trainer_comes_last():
    got = choose(0, ["a", "b"], ["c", "d"], "t", ())
    assert got == ("a", "b", "c", "d", "t")
    assert choose(1, ["a", "b"], ["c", "d"], None, ()) == ("a", "d", "c", "b")
    assert choose(0, [], [], "t", ()) == ("t",)
    assert choose(0, [], [], None, ()) == ()


@pytest.mark.parametrize("size", [2, 3, MAX_PEERS, MAX_PEERS + 1, MAX_PEERS + 2, 64, 1000])
def test_load_is_spread_evenly_and_nobody_is_sent_to_itself(size: int):
    ring = names(size)
    got = [assigned(i, ring) for i in range(size)]
    for name, sources in zip(ring, got, strict=True):
        assert name not in sources
        assert len(set(sources)) == len(sources) == min(size - 1, MAX_PEERS) + 1
        assert sources[-1] == "t"
    firsts = Counter(sources[0] for sources in got)
    assert set(firsts.values()) == {1}
    of_each = Counter(name for sources in got for name in sources[:-1])
    assert set(of_each.values()) == {min(size - 1, MAX_PEERS)}


@pytest.mark.parametrize(("size", "most"), [(64, 3), (1000, 5)])
def test_a_bucket_needs_few_relays_to_reach_everybody(size: int, most: int):
    """From any one node; in a ring of near neighbours it would be size / MAX_PEERS."""
    ring = names(size)
    edges = {name: assigned(i, ring)[:-1] for i, name in enumerate(ring)}
    reached, num_relays = {ring[0]}, 0
    while len(reached) < size:
        reached |= {name for name in ring if reached.intersection(edges[name])}
        num_relays += 1
    assert num_relays <= most


def test_place_of_who_is_barred_goes_to_another():
    ring = names(64)
    usual = assigned(5, ring)
    barred = set(usual[:3])
    got = choose(5, [], ring, "t", {"n5", *barred})
    assert len(got) == MAX_PEERS + 1
    assert not barred.intersection(got)
    assert choose(5, [], ring, "t", set(ring)) == ("t",)


# Deltas


def link(base: int, target: int, num_bytes: int = 10) -> DeltaOffer:
    return DeltaOffer(f"d{base}", f"d{target}", f"delta-{target}", 1, num_bytes)


def links_to(count: int, num_bytes: int = 10) -> dict[str, DeltaOffer]:
    return {f"d{k}": link(k - 1, k, num_bytes) for k in range(1, count + 1)}


def test_chain_leads_from_what_a_node_holds_oldest_first():
    deltas = links_to(4)
    assert delta_chain(deltas, "d1", "d4", 1000) == (link(1, 2), link(2, 3), link(3, 4))
    assert delta_chain(deltas, "d4", "d4", 1000) == ()
    assert delta_chain(deltas, "elsewhere", "d4", 1000) == ()
    assert delta_chain(deltas, "", "d4", 1000) == ()


def test_chain_with_a_link_missing_is_none():
    deltas = links_to(3)
    del deltas["d2"]
    assert delta_chain(deltas, "d0", "d3", 1000) == ()
    assert delta_chain(deltas, "d2", "d3", 1000) == (link(2, 3),)


def test_chain_that_is_too_large_or_too_long_or_a_circle_is_none():
    deltas = links_to(3, 99)  # 100 with their manifests
    assert len(delta_chain(deltas, "d0", "d3", 300)) == 3
    assert delta_chain(deltas, "d0", "d3", 299) == ()
    deltas = links_to(MAX_CHAIN + 1)
    assert len(delta_chain(deltas, "d1", f"d{MAX_CHAIN + 1}", 1 << 30)) == MAX_CHAIN
    assert delta_chain(deltas, "d0", f"d{MAX_CHAIN + 1}", 1 << 30) == ()
    circle = {"a": DeltaOffer("b", "a", "x", 1, 1), "b": DeltaOffer("a", "b", "y", 1, 1)}
    assert delta_chain(circle, "c", "b", 1 << 30) == ()


def test_only_deltas_to_the_published_version_are_stored_and_the_oldest_are_forgotten():
    sources = WeightSources(SETTINGS)
    for version in range(1, 3 * MAX_CHAIN):
        deltas = (link(version - 1, version), link(version, version), link(0, version + 1))
        sources.set_version(PublishWeights(version, f"d{version}", 1000, 10, deltas=deltas))
    assert not sources.add_deltas([link(version - 1, version)])
    assert sources.add_deltas([link(version - 1, version, 9)])
    assert len(sources._deltas) == MAX_CHAIN
    assert all(delta.base != key for key, delta in sources._deltas.items())


def test_a_node_that_pulls_longer_than_a_step_gets_the_delta_from_its_version():
    d = Driver(num_steps=9)
    d.start("a", slots=9)
    d.decode(lambda _: 2)
    d.train(0)
    d.confirm("a", 1)
    d.join("late")  # and pulls version 1
    d.feed(MessageArrived("late", Heartbeat(weights=WeightsProgress(1, 10, 1000, 1))))
    d.decode(lambda _: 2)
    assert dict(sent(d.train(1), PublishWeights))["late"].deltas == ()
    delta = DeltaOffer("digest-1", "digest-2", "delta", 10, 20)
    offered = d.feed(MessageArrived("t", replace(publication(2), deltas=(delta,))))
    assert dict(sent(offered, PublishWeights))["late"].deltas == (delta,)
    d.feed(MessageArrived("late", Heartbeat()))
    assert dict(sent(d.confirm("late", 1), PublishWeights))["late"].deltas == (delta,)
