"""Three nodes that pull a version from a trainer and from each other, each on a line of its own,
while one of them, or a line, is lost: everybody else has it soon after, bit for bit."""

import filecmp
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import VersionFile
from scripts.bench.weights_lib.nodes import Node, nodes
from tests.support.lines import Star, why_not
from tests.support.versions import make_version

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(why_not()), reason=why_not())]

NUM = 3
SIZE = (8, BUCKET_BYTES)  # tensors, bytes of each: 67 MB
LINE = 20e6  # bytes/s in each direction, so that a version takes 3.4 s
CUT_S = 2.0
LIMIT_S = 30.0  # far more than it takes, far less than a connection that nobody gives up
STREAMS = 4


class World:
    """A trainer that has the version, and nodes that do not."""

    def __init__(self, star: Star, members: list[Node], version: VersionFile, folder: Path) -> None:
        self.star, self.version, self._folder = star, version, folder
        self.trainer, *self.nodes = members
        self._threads = ThreadPoolExecutor(2 * NUM)
        self._ends: dict[Node, Future[dict[str, Any]]] = {}
        self.trainer.publish(version)

    def begin(self, *pulling: Node) -> None:
        for node in pulling:
            sources = [*(p for p in self.nodes if p.name != node.name), self.trainer]
            node.pull(self.version, self.path(node), sources, STREAMS)

    def path(self, node: Node) -> Path:
        return self._folder / node.name

    def finish(self, *pulling: Node) -> list[dict[str, Any]]:
        """Their stats; all have the version, within LIMIT_S from now."""
        deadline = time.monotonic() + LIMIT_S
        waiting = [self.ends(node) for node in pulling]
        stats = [w.result(max(0.0, deadline - time.monotonic()))["stats"] for w in waiting]
        for node in pulling:
            assert filecmp.cmp(self.path(node), self.version.path, shallow=False)
        return stats

    def ends(self, node: Node) -> Future[dict[str, Any]]:
        """What it says at the end of its pull."""
        if node not in self._ends:
            self._ends[node] = self._threads.submit(node.stats)
        return self._ends[node]

    def until_half(self, node: Node) -> None:
        half = self.version.num_bytes // 2
        self._threads.submit(node.until_proved, half).result(LIMIT_S)

    def close(self) -> None:
        for node in (self.trainer, *self.nodes):
            node.kill()  # ends the threads that listen to it
        self._threads.shutdown()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    version = make_version(tmp_path / "v1.bin", 1, *SIZE)
    star = Star(f"{os.getpid()}-pull", NUM + 1)
    with star.up():
        for k in range(NUM + 1):
            star.set_rate(k, LINE, LINE)
        names = ["trainer", *(f"n{k}" for k in range(NUM))]
        given = [(name, star.address(k), star.space(k)) for k, name in enumerate(names)]
        with nodes(*given) as members:
            one = World(star, members, version, tmp_path)
            try:
                yield one
            finally:
                one.close()


def test_node_that_is_killed_while_it_relays_is_not_missed_and_goes_on_where_it_was(world: World):
    killed, *others = world.nodes
    world.begin(*world.nodes)
    world.until_half(killed)
    killed.kill()
    world.finish(*others)
    again = Node(killed.name, world.star.address(1), world.star.space(1))
    try:
        world.begin(again)
        (stats,) = world.finish(again)
    finally:
        again.close()
    assert stats["num_bytes"] < 0.7 * world.version.num_bytes


@pytest.mark.slow
def test_nodes_do_not_wait_for_one_that_stands_still_which_ends_when_it_may_go_on(world: World):
    frozen, *others = world.nodes
    world.begin(*world.nodes)
    world.until_half(frozen)
    frozen.signal(signal.SIGSTOP)
    world.finish(*others)
    frozen.signal(signal.SIGCONT)
    world.finish(frozen)


@pytest.mark.slow
def test_node_whose_line_is_cut_for_a_while_ends_too(world: World):
    world.begin(*world.nodes)
    world.until_half(world.nodes[0])
    world.star.cut(1)
    with pytest.raises(TimeoutError):  # without its line it does not get what it lacks
        world.ends(world.nodes[0]).result(CUT_S)
    world.star.cut(1, is_cut=False)
    world.finish(*world.nodes)


@pytest.mark.slow
def test_nodes_end_without_the_trainer_once_a_peer_has_everything(world: World):
    first, *late = world.nodes
    world.begin(first)
    world.finish(first)
    world.begin(*late)
    world.until_half(late[0])
    world.star.cut(0)
    stats = world.finish(*late)
    assert all(s["peer_bytes"] > 0.5 * world.version.num_bytes for s in stats)
