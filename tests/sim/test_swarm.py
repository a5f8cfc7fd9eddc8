"""Nodes that pull from each other: by buckets, and as fluids."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from time import process_time
from typing import Any

import pytest

from lightrl.core.weights.weight_sources import choose
from lightrl.sim.weights.swarm import Parcel, Swarm
from tests.sim.buckets import MISSED_AFTER_S, BucketSwarm
from tests.support.tiers import e2e

NEWS = Parcel(1)
SIZE = 1e9
ALONE_S = 1.0  # on a line of so many bytes a second
NAMES = [f"n{k}" for k in range(8)]

# The model of the simulator, and one that is exact for a few nodes.
SWARMS: dict[str, Callable[[float], Swarm | BucketSwarm]] = {
    "buckets": lambda bucket_bytes: BucketSwarm("trainer", bucket_bytes),
    "fluids": lambda bucket_bytes: Swarm("trainer"),
}


@dataclass
class Play:
    """A swarm to its end, with things that happen in between."""

    swarm: Swarm | BucketSwarm
    now: float = 0.0
    done: dict[str, float] = field(default_factory=dict[str, float])

    def until(self, end: float = math.inf) -> "Play":
        while (at := self.swarm.next_at()) <= end and at < math.inf:
            self._advance(at)
        if end < math.inf:
            self._advance(end)
        return self

    def _advance(self, at: float) -> None:
        assert at >= self.now
        self.now = at
        for node, parcel, *_ in self.swarm.advance(at):
            assert parcel == NEWS
            assert node not in self.done
            self.done[node] = at

    @property
    def last_s(self) -> float:
        return max(self.done.values())

    @property
    def mean_s(self) -> float:
        return fmean(self.done.values())

    @property
    def versions_of_trainer(self) -> float:
        return self.swarm.sent["trainer"] / SIZE


def play(
    kind: str,
    up: float | Mapping[str, float] = SIZE,
    trainer_up: float = SIZE,
    down: float = SIZE,
    names: list[str] = NAMES,
    bucket_bytes: float = 8 << 20,
) -> Play:
    swarm = SWARMS[kind](bucket_bytes)
    swarm.add_node("trainer", trainer_up, math.inf)
    for name in [*names, "late"]:
        swarm.add_node(name, up.get(name, SIZE) if isinstance(up, Mapping) else up, down)
    swarm.hold(0.0, "trainer", NEWS)
    return Play(swarm)


def peers_of(name: str, names: list[str] = NAMES) -> list[str]:
    """By the core's own assignment."""
    index = names.index(name) if name in names else len(names)
    return list(choose(index, (), names, "trainer", {name}))


def pull_all(p: Play, names: list[str] = NAMES, relays: bool = True) -> Play:
    for name in names:
        sources = peers_of(name, names) if relays else ["trainer"]
        p.swarm.pull(0.0, name, NEWS, SIZE, sources)
    return p


@pytest.mark.parametrize("kind", SWARMS)
def test_eight_take_hardly_longer_than_one(kind: str):
    together = pull_all(play(kind)).until()
    assert len(together.done) == 8
    assert ALONE_S * 0.98 <= together.last_s <= 1.3 * ALONE_S
    assert together.versions_of_trainer <= 2
    sent = sum(together.swarm.sent.values())
    assert sent == pytest.approx(8 * SIZE, rel=0.02)


@pytest.mark.parametrize("kind", SWARMS)
def test_without_relays_each_costs_the_trainer_a_version(kind: str):
    naive = pull_all(play(kind), relays=False).until()
    assert naive.last_s == pytest.approx(8 * ALONE_S, rel=0.02)
    assert naive.versions_of_trainer == pytest.approx(8, rel=0.02)


@pytest.mark.parametrize("kind", SWARMS)
def test_a_ninth_that_comes_half_way(kind: str):
    p = pull_all(play(kind)).until(0.5)
    p.swarm.pull(0.5, "late", NEWS, SIZE, peers_of("late"))
    p.until()
    assert len(p.done) == 9
    assert p.done["late"] - 0.5 <= 1.5 * ALONE_S
    assert max(p.done[n] for n in NAMES) <= 1.3 * ALONE_S


@pytest.mark.parametrize("kind", SWARMS)
def test_one_of_them_killed_half_way(kind: str):
    p = pull_all(play(kind)).until(0.5)
    p.swarm.lose(0.5, "n3")
    p.until()
    assert set(p.done) == set(NAMES) - {"n3"}
    assert p.last_s <= 1.7 * ALONE_S
    assert p.versions_of_trainer <= 2


def test_what_a_dead_source_owed_is_asked_of_others_after_a_while():
    p = play("buckets", trainer_up=SIZE / 100)
    p.swarm.hold(0.0, "n1", NEWS)
    p.swarm.pull(0.0, "n0", NEWS, SIZE, ["n1", "trainer"])
    p.until(0.25)
    p.swarm.lose(0.25, "n1")
    p.until()
    assert p.swarm.sent["n1"] == pytest.approx(0.25 * SIZE, rel=0.05)
    # Before that is missed the trainer, the last to be asked, is asked for nothing.
    assert p.done["n0"] == pytest.approx(0.25 + MISSED_AFTER_S + 75, rel=0.02)
    assert p.versions_of_trainer == pytest.approx(0.75, rel=0.02)
    assert sum(p.swarm.sent.values()) == pytest.approx(SIZE)


@pytest.mark.parametrize("kind", SWARMS)
def test_a_pull_without_a_source_waits_for_one_and_keeps_what_it_has(kind: str):
    p = play(kind)
    p.swarm.hold(0.0, "n1", NEWS)
    p.swarm.pull(0.0, "n0", NEWS, SIZE, ["n1"])
    p.until(0.5)
    p.swarm.lose(0.5, "n1")
    p.swarm.pull(0.5, "n2", NEWS, SIZE, ["n1"])  # by old news
    p.until()
    assert not p.done
    p.swarm.pull(9.0, "n0", NEWS, SIZE, ["trainer"])
    p.until()
    assert p.done["n0"] == pytest.approx(9.5, abs=0.02)
    assert p.versions_of_trainer == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("kind", SWARMS)
def test_a_newer_version_takes_the_place_of_an_older_one(kind: str):
    p = play(kind)
    p.swarm.pull(0.0, "n0", Parcel(0), SIZE, ["trainer"])
    assert p.swarm.next_at() == math.inf  # nobody holds that one
    p.swarm.pull(1.0, "n0", NEWS, SIZE, ["trainer"])
    p.until()
    assert p.done == {"n0": pytest.approx(2.0, abs=0.02)}
    p.swarm.forget(before=2)
    p.swarm.pull(3.0, "n1", NEWS, SIZE, ["n0", "trainer"])
    assert p.swarm.next_at() == math.inf


@pytest.mark.parametrize("kind", SWARMS)
def test_complete_peers_come_before_the_trainer(kind: str):
    p = play(kind, trainer_up=8 * SIZE)
    p.swarm.hold(0.0, "n1", NEWS)
    p.swarm.pull(0.0, "n0", NEWS, SIZE, ["n1", "trainer"])
    p.until()
    assert p.done["n0"] == pytest.approx(ALONE_S, rel=0.02)
    assert p.swarm.sent["trainer"] == 0


MANY = [f"n{k}" for k in range(32)]
MIXED = {name: (0.3 + 0.2 * (k % 7)) * SIZE for k, name in enumerate(MANY)}


@pytest.mark.parametrize(
    ("num", "lines"),
    [
        (8, {}),
        (8, {"trainer_up": SIZE / 4}),
        (8, {"trainer_up": 4 * SIZE}),
        (8, {"up": SIZE / 2}),
        (8, {"up": SIZE / 4, "trainer_up": 3 * SIZE}),
        (8, {"down": SIZE / 2}),
        (8, {"up": MIXED}),
        *e2e(
            [
                (16, {}),
                (16, {"up": SIZE / 2, "trainer_up": 2 * SIZE}),
                (16, {"up": MIXED}),
            ]
        ),
    ],
)
def test_the_fluids_are_as_quick_as_small_buckets(num: int, lines: dict[str, Any]):
    names = MANY[:num]
    fluid, exact = (
        pull_all(play(kind, names=names, bucket_bytes=SIZE / 512, **lines), names).until()
        for kind in ("fluids", "buckets")
    )
    for a, b in ((fluid.last_s, exact.last_s), (fluid.mean_s, exact.mean_s)):
        assert a * 0.99 <= b <= a * 1.12
    assert exact.versions_of_trainer == pytest.approx(fluid.versions_of_trainer, rel=0.05)


def test_where_each_knows_only_some_of_the_others_the_fluids_are_too_quick():
    """As `swarm.py` says: 16 of 31 are known, and the trainer is asked twice for some buckets."""
    fluid, exact = (
        pull_all(play(kind, names=MANY), MANY).until() for kind in ("fluids", "buckets")
    )
    assert fluid.last_s == pytest.approx(ALONE_S, rel=0.01)
    assert 1.2 * fluid.last_s <= exact.last_s <= 2 * fluid.last_s


@pytest.mark.e2e
def test_a_thousand_are_simulated_quickly():
    names = [f"n{k}" for k in range(1000)]
    up = {name: (0.5 + k % 8) * SIZE for k, name in enumerate(names)}
    began = process_time()
    p = pull_all(play("fluids", up=up, names=names), names)
    for k in range(1, 20):
        p.until(k / 20)
        p.swarm.lose(k / 20, names[37 * k])
    p.until()
    assert len(p.done) == 1000 - 19
    assert process_time() - began < 8.0


PATH = ("trainer", *NAMES)


@pytest.mark.parametrize("kind", SWARMS)
def test_along_a_path_each_line_carries_the_bytes_once(kind: str):
    swarm = play(kind, up={"n3": SIZE / 2}).swarm
    swarm.send(0.0, PATH, NEWS, SIZE)
    assert swarm.next_at() == pytest.approx(2.0)  # all at the pace of the slowest
    [arrived] = swarm.advance(swarm.next_at())
    assert arrived == ("trainer", NEWS, SIZE, 0.0)
    assert swarm.next_at() == math.inf
    assert swarm.sent == {
        **dict.fromkeys(PATH[:-1], pytest.approx(SIZE)),
        **dict.fromkeys([NAMES[-1], "late"], 0.0),
    }


@pytest.mark.parametrize("kind", SWARMS)
def test_a_path_and_a_pull_share_the_line_of_the_trainer(kind: str):
    p = play(kind)
    p.swarm.send(0.0, PATH, NEWS, SIZE)
    p.swarm.pull(0.0, "late", NEWS, SIZE, ["trainer"])
    p.until()
    assert p.done == {"late": pytest.approx(2.0, rel=0.02), "trainer": pytest.approx(2.0, rel=0.02)}
    assert p.versions_of_trainer == pytest.approx(2.0, rel=0.02)
    assert sum(p.swarm.sent.values()) == pytest.approx((8 + 1) * SIZE, rel=0.02)


@pytest.mark.parametrize("kind", SWARMS)
def test_a_path_that_is_given_up_has_sent_what_it_has_and_leaves_its_lines(kind: str):
    p = play(kind)
    p.swarm.send(0.0, PATH, NEWS, SIZE)
    p.until(0.25)
    p.swarm.end_send(0.25)
    assert p.swarm.sent["n6"] == pytest.approx(SIZE / 4)
    p.swarm.pull(0.25, "n0", NEWS, SIZE, ["trainer"])
    p.until()
    assert p.done == {"n0": pytest.approx(1.25, rel=0.02)}
