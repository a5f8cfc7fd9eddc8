"""From whom a node pulls: the assignment itself, and which differences lead where."""

from collections import Counter
from dataclasses import replace

import pytest

from lightrl.core.events import HeartbeatArrived, WeightsPublished
from lightrl.core.weights.weight_sources import (
    MAX_CHAIN,
    MAX_PEERS,
    MAX_SHARE,
    DeltaChain,
    PeerRing,
    choose,
)
from lightrl.messages.nodes import Heartbeat
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsProgress
from tests.core.conftest import Driver, publication, sent


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def assigned(index: int, ring: list[str]) -> tuple[str, ...]:
    """To a member of the ring of those who are at it; nobody has it but the trainer."""
    return choose(index, [], ring, "t", lambda n: n == ring[index])


def test_who_has_it_comes_before_who_is_at_it_and_the_trainer_comes_last():
    got = choose(0, ["a", "b"], ["c", "d"], "t", lambda _: False)
    assert got == ("a", "b", "c", "d", "t")
    assert choose(1, ["a", "b"], ["c", "d"], None, lambda _: False) == ("a", "d", "c", "b")
    assert choose(0, [], [], "t", lambda _: False) == ("t",)
    assert choose(0, [], [], None, lambda _: False) == ()


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
    got = choose(5, [], ring, "t", lambda n: n == "n5" or n in barred)
    assert len(got) == MAX_PEERS + 1
    assert not barred.intersection(got)
    assert choose(5, [], ring, "t", lambda _: True) == ("t",)


def test_ring_keeps_its_members_and_their_places():
    ring = PeerRing()
    for name in "abcd":
        ring.put(name, True)
    ring.put("a", True)
    ring.put("b", False)
    ring.put("b", False)
    assert sorted(ring.names) == ["a", "c", "d"]
    assert all(ring.names[ring.place(n, -1)] == n for n in ring.names)
    assert ring.place("b", -1) == -1
    ring.clear()
    assert (len(ring), "a" in ring) == (0, False)


# Differences


def link(base: int, target: int, num_bytes: int = 10) -> DeltaOffer:
    return DeltaOffer(f"d{base}", f"d{target}", f"delta-{target}", 1, num_bytes)


def chain_of(count: int, num_bytes: int = 10) -> DeltaChain:
    deltas = DeltaChain()
    for version in range(1, count + 1):
        deltas.add(f"d{version}", [link(version - 1, version, num_bytes)])
    return deltas


def test_chain_leads_from_what_a_node_holds_oldest_first():
    assert chain_of(4).between("d1", "d4", 1000) == (link(1, 2), link(2, 3), link(3, 4))
    assert chain_of(4).between("d4", "d4", 1000) == ()
    assert chain_of(4).between("elsewhere", "d4", 1000) == ()
    assert chain_of(4).between("", "d4", 1000) == ()


def test_chain_with_a_link_missing_is_none():
    deltas = DeltaChain()
    deltas.add("d1", [link(0, 1)])
    deltas.add("d2", [])
    deltas.add("d3", [link(2, 3)])
    assert deltas.between("d0", "d3", 1000) == ()
    assert deltas.between("d2", "d3", 1000) == (link(2, 3),)


def test_chain_that_is_about_as_large_as_the_version_is_none():
    deltas, size = chain_of(3, 99), 600  # 100 with their manifests
    assert MAX_SHARE * size >= 3 * 100
    assert len(deltas.between("d0", "d3", size)) == 3
    assert deltas.between("d0", "d3", size - 1) == ()


def test_chain_is_bounded_and_the_oldest_links_are_forgotten():
    deltas = chain_of(3 * MAX_CHAIN)
    newest = 3 * MAX_CHAIN
    assert len(deltas.between(f"d{newest - MAX_CHAIN}", f"d{newest}", 1 << 30)) == MAX_CHAIN
    assert deltas.between(f"d{newest - MAX_CHAIN - 1}", f"d{newest}", 1 << 30) == ()
    assert len(deltas._leading_to) == MAX_CHAIN


def test_what_leads_elsewhere_or_in_a_circle_is_not_passed_on():
    deltas = DeltaChain()
    deltas.add("d2", [link(0, 1), link(2, 2)])
    assert deltas.between("d0", "d2", 1000) == ()
    deltas.add("a", [DeltaOffer("b", "a", "x", 1, 1)])
    deltas.add("b", [DeltaOffer("a", "b", "y", 1, 1)])
    assert deltas.between("c", "b", 1 << 30) == ()


def test_a_node_that_pulls_longer_than_a_step_gets_the_delta_from_its_version():
    d = Driver(num_steps=9)
    d.start("a", slots=9)
    d.decode(lambda _: 2)
    d.train(0)
    d.confirm("a", 1)
    d.join("late")  # and pulls version 1
    d.feed(HeartbeatArrived("late", Heartbeat(weights=WeightsProgress(1, 10, 1000, 1))))
    d.decode(lambda _: 2)
    assert dict(sent(d.train(1), PublishWeights))["late"].deltas == ()
    delta = DeltaOffer("digest-1", "digest-2", "delta", 10, 20)
    offered = d.feed(WeightsPublished("t", replace(publication(2), deltas=(delta,))))
    assert dict(sent(offered, PublishWeights))["late"].deltas == (delta,)
    d.feed(HeartbeatArrived("late", Heartbeat()))
    assert dict(sent(d.confirm("late", 1), PublishWeights))["late"].deltas == (delta,)
