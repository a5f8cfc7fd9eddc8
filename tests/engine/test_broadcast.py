"""Engines as members of a broadcast group: what they serve after one, and after one that failed."""

import multiprocessing
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightrl.engine.base import (
    EngineFailed,
    EngineLoaded,
    GroupJoined,
    JoinGroup,
    ReceiveWeights,
)
from lightrl.messages import Sampling
from lightrl.system.addresses import join_address
from lightrl.weights.broadcast.rendezvous import Membership
from lightrl.weights.version.manifest import VersionFile
from tests.engine import broadcast_rank
from tests.engine.test_equality import PROMPTS

SEED = bytes(32)
GREEDY = Sampling(0.0)


@dataclass
class Rank:
    """One training rank in a process of its own, which sends what it is told to."""

    address: str
    place: Membership
    process: Any
    pipe: Any

    def send(self, file: VersionFile, dies_at: int | None = None) -> tuple[int, ...]:
        """Begins; the sums of what it sends."""
        self.pipe.send((file, SEED, dies_at))
        assert self.pipe.poll(30)
        return self.pipe.recv()


@contextmanager
def rank(timeout_s: float = 20.0) -> Iterator[Rank]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([broadcast_rank.__name__])
    place = Membership(secrets.token_hex(16), 0, 1, 2, "gloo", timeout_s, piece_bytes=4096)
    ours, theirs = context.Pipe()
    process = context.Process(target=broadcast_rank.main, args=(place, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(30)
        yield Rank(join_address(*ours.recv()), replace(place, rank=1), process, ours)
    finally:
        ours.close()
        process.kill()
        process.join()


def join(engine: Any, one: Rank) -> None:
    engine.child.send(JoinGroup(one.address, one.place))
    assert _next(engine, GroupJoined) == GroupJoined(one.place.name)


def receive(engine: Any, one: Rank, file: VersionFile, sums: tuple[int, ...]) -> Any:
    only_manifest = replace(file, path="")
    engine.child.send(ReceiveWeights(only_manifest, one.place.name, SEED, sums))
    return _next(engine, EngineLoaded, EngineFailed)


def _next(engine: Any, *kinds: type) -> Any:
    while not isinstance(event := engine.receive(), kinds):
        pass
    return event


def served(engine: Any, ask: Any, version: int, name: str) -> list[tuple[Any, Any]]:
    asked = [ask(f"{name}{i}", p, 20, seed=i) for i, p in enumerate(PROMPTS)]
    return [(o.tokens, o.logprobs) for o in engine.run(version, GREEDY, *asked)]


def test_a_broadcast_leaves_what_a_file_leaves(real_engine, ask, tiny):
    expected = {}
    for version in (1, 2):
        real_engine.load(version)
        expected[version] = served(real_engine, ask, version, f"file{version}-")
    assert expected[1] != expected[2]
    with rank() as one:
        join(real_engine, one)
        for version in (1, 2, 1):  # one group lives for many
            file = tiny.files[version]
            loaded = receive(real_engine, one, file, one.send(file))
            assert (loaded.policy_version, loaded.digest) == (version, file.digest)
            assert served(real_engine, ask, version, "group") == expected[version]


@pytest.mark.parametrize("dies_at", [0, 3, 7, 14, 23])
def test_after_a_rank_that_died_in_the_middle_a_file_leaves_what_it_should(
    real_engine, ask, tiny, dies_at
):
    real_engine.load(1)
    expected = served(real_engine, ask, 1, f"before{dies_at}-")
    with rank() as one:
        join(real_engine, one)
        sums = one.send(tiny.files[2], dies_at)
        failed = receive(real_engine, one, tiny.files[2], sums)
        assert isinstance(failed, EngineFailed)
        assert "member 0 is gone" in failed.reason
        # nor is anything served that was there before
        real_engine.generate(2, GREEDY, ask("none", PROMPTS[0], 3))
        assert "loaded is none" in _next(real_engine, EngineFailed).reason
    real_engine.load(1)
    assert served(real_engine, ask, 1, f"after{dies_at}-") == expected


def test_other_sums_than_those_of_the_ranks_are_not_served(real_engine, tiny, ask):
    with rank() as one:
        join(real_engine, one)
        sums = one.send(tiny.files[2])
        failed = receive(real_engine, one, tiny.files[2], (sums[0] ^ 1, *sums[1:]))
        assert "is not what the ranks sent" in failed.reason
    real_engine.generate(2, GREEDY, ask("none", PROMPTS[0], 3))
    assert "loaded is none" in _next(real_engine, EngineFailed).reason
    real_engine.load(2)


def test_an_engine_that_finds_nobody_says_so_and_goes_on(real_engine, ask, tiny):
    real_engine.load(1)
    place = Membership("nobody", 1, 1, 2, "gloo", 2.0)
    real_engine.child.send(JoinGroup("127.0.0.1:9", place))
    joined = _next(real_engine, GroupJoined)
    assert joined.error is not None
    assert "127.0.0.1:9" in joined.error
    assert len(served(real_engine, ask, 1, "alone")) == len(PROMPTS)
    unknown = ReceiveWeights(replace(tiny.files[1], path=""), "nobody", SEED, (0, 0))
    real_engine.child.send(unknown)
    assert "not a member" in _next(real_engine, EngineFailed).reason
    real_engine.load(1)
