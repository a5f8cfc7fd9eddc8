"""Nodes that pull weights from the trainer and from each other, as a fluid."""

import math
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import pytest

from lightrl.sim.weights.swarm import FluidSwarm, Parcel

NEWS = Parcel(1)
SIZE = 1e9
ALONE_S = 1.0  # on a line of so many bytes a second
NAMES = [f"n{k}" for k in range(8)]


@dataclass
class Play:
    """A swarm to its end, with things that happen in between."""

    swarm: FluidSwarm
    now: float = 0.0
    done: dict[str, float] = field(default_factory=dict[str, float])
    peer_bytes: float = 0.0

    def until(self, end: float = math.inf) -> "Play":
        while (at := self.swarm.next_at()) <= end and at < math.inf:
            self._advance(at)
        if end < math.inf:
            self._advance(end)
        return self

    def _advance(self, at: float) -> None:
        assert at >= self.now
        self.now = at
        for node, pull in self.swarm.advance(at):
            assert node not in self.done
            self.done[node] = at
            self.peer_bytes += pull.peer_bytes

    @property
    def last_s(self) -> float:
        return max(self.done.values())

    @property
    def versions_of_trainer(self) -> float:
        return self.swarm.sent / SIZE


def play(sender: float = SIZE, relay: float = SIZE, relays: bool = True) -> Play:
    return Play(FluidSwarm(sender, relay, SIZE, relays))


def pull_all(p: Play, names: list[str] = NAMES) -> Play:
    for name in names:
        p.swarm.pull(p.now, name, [(NEWS, SIZE)])
    return p


def test_eight_take_no_longer_than_one():
    together = pull_all(play()).until()
    assert len(together.done) == 8
    assert together.last_s == pytest.approx(ALONE_S)
    assert together.versions_of_trainer == pytest.approx(1)
    assert together.peer_bytes == pytest.approx(7 * SIZE)


@pytest.mark.parametrize(
    ("lines", "expected_s"),
    [
        ({"sender": SIZE / 4}, 4.0),  # the trainer sends each byte once, and that takes so long
        ({"relay": SIZE / 2}, 8 / 5),  # all lines together: 1 + 8 x 1/2
        ({"relays": False}, 8.0),
    ],
)
def test_the_line_that_limits(lines: dict[str, Any], expected_s: float):
    p = pull_all(play(**lines)).until()
    assert p.last_s == pytest.approx(expected_s)
    total = p.swarm.sent + p.peer_bytes
    assert total == pytest.approx(8 * SIZE)
    assert (p.peer_bytes == pytest.approx(0)) == ("relays" in lines)


def test_a_ninth_that_comes_half_way():
    p = pull_all(play(sender=SIZE / 2)).until(1.0)
    p.swarm.pull(1.0, "late", [(NEWS, SIZE)])
    p.until()
    assert all(p.done[name] == pytest.approx(2.0) for name in NAMES)
    assert p.done["late"] == pytest.approx(2.0)  # it has caught up
    assert p.versions_of_trainer == pytest.approx(1)


def test_one_of_them_killed_half_way():
    p = pull_all(play()).until(0.5)
    p.swarm.lose(0.5, "n3")
    p.until()
    assert set(p.done) == set(NAMES) - {"n3"}
    assert p.last_s == pytest.approx(ALONE_S)


def test_a_newer_version_takes_the_place_of_an_older_one():
    p = play()
    p.swarm.pull(0.0, "n0", [(Parcel(0), SIZE)])
    p.until(0.5)
    assert p.swarm.left(0.5, "n0", Parcel(0)) == pytest.approx(SIZE / 2)
    p.swarm.pull(0.5, "n0", [(Parcel(0), SIZE), (Parcel(1, 0), SIZE / 10)])
    p.until()
    assert p.done == {"n0": pytest.approx(1.1)}  # what had arrived counts
    p.swarm.pull(p.now, "n1", [(NEWS, SIZE)])
    assert p.swarm.left(p.now, "n1", Parcel(0)) is None


def test_nodes_that_hold_a_version_send_it_in_place_of_the_trainer():
    p = play()
    p.swarm.hold(0.0, "n1", NEWS)
    p.swarm.pull(0.0, "n0", [(NEWS, SIZE)])
    p.until()
    assert p.done["n0"] == pytest.approx(ALONE_S)
    assert p.swarm.sent == 0
    p.swarm.lose(p.now, "n0")
    p.swarm.forget(before=2)
    p.swarm.pull(p.now, "n2", [(NEWS, SIZE)])
    p.until()
    assert p.versions_of_trainer == pytest.approx(1)


def test_two_parcels_share_the_line_of_the_trainer():
    p = play()
    p.swarm.pull(0.0, "n0", [(NEWS, SIZE)])
    p.swarm.pull(0.0, "n1", [(Parcel(1, 0), SIZE / 10)])
    p.until()
    assert p.done == {"n1": pytest.approx(0.2), "n0": pytest.approx(1.1)}
    assert p.swarm.sent == pytest.approx(1.1 * SIZE)


def test_a_thousand_are_simulated_quickly():
    names = [f"n{k}" for k in range(1000)]
    began = process_time()
    p = pull_all(play(), names)
    for k in range(1, 20):
        p.until(k / 20)
        p.swarm.lose(k / 20, names[37 * k])
    p.until()
    assert len(p.done) == 1000 - 19
    assert process_time() - began < 8.0
