"""Engines as members of a broadcast group: what they serve after one, and after one that failed."""

import multiprocessing
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightrl.engine.base import DropBroadcast, EngineFailed, EngineLoaded, ReceiveWeights
from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.messages.responses import Sampling
from lightrl.messages.weights import Canary
from lightrl.weights.broadcast.membership import Membership
from lightrl.weights.version.manifest import VersionFile
from lightrl.wire import pack_f32, pack_i32
from tests.engine import broadcast_rank
from tests.engine.broadcast_rank import Order
from tests.engine.test_equality import PROMPTS

GREEDY = Sampling(0.0)
LONG = 400  # tokens


@dataclass
class Rank:
    """Training rank 0 in a process of its own, which sends what it is told to, and the place of the
    receiver."""

    place: Membership
    process: Any
    pipe: Any

    @property
    def group(self) -> BroadcastGroup:
        return self.place.group

    def send(self, file: VersionFile, **fields: Any) -> None:
        """Begins; see `Order`."""
        self.pipe.send(Order(file, **fields))

    def says(self) -> Any:
        assert self.pipe.poll(90)
        return self.pipe.recv()


@contextmanager
def rank(timeout_s: float = 20.0, world: int = 2) -> Iterator[Rank]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([broadcast_rank.__name__])
    group = BroadcastGroup(secrets.token_hex(16), "", 0, world, "gloo")
    ours, theirs = context.Pipe()
    place = Membership(group, timeout_s)
    process = context.Process(target=broadcast_rank.main, args=(place, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(90)
        receiver = replace(group, rank=1, address=ours.recv())
        yield Rank(Membership(receiver, timeout_s), process, ours)
    finally:
        ours.close()
        process.kill()
        process.join()


def receive(one: Rank, file: VersionFile, canary: Canary | None = None) -> ReceiveWeights:
    """The order to do so; of the version only the manifest is where the engine is."""
    return ReceiveWeights(replace(file, path=""), one.place, canary)


def _next(engine: Any, *kinds: type) -> Any:
    while not isinstance(event := engine.receive(), kinds):
        pass
    return event


def answer(engine: Any) -> Any:
    return _next(engine, EngineLoaded, EngineFailed)


def served(engine: Any, ask: Any, version: int, name: str) -> list[tuple[Any, Any]]:
    asked = [ask(f"{name}{i}", p, 20, seed=i) for i, p in enumerate(PROMPTS)]
    return [(o.tokens, o.logprobs) for o in engine.run(version, GREEDY, *asked)]


def assert_serves_nothing(engine: Any, ask: Any, version: int) -> None:
    engine.generate(version, GREEDY, ask("none", PROMPTS[0], 3))
    assert "loaded is none" in _next(engine, EngineFailed).reason


def test_a_broadcast_leaves_what_a_file_leaves(real_engine, ask, tiny):
    expected = {}
    for version in (1, 2):
        real_engine.load(version)
        expected[version] = served(real_engine, ask, version, f"file-{version}-")
    assert expected[1] != expected[2]
    with rank() as one:
        for version in (1, 2, 1):  # one group lives for many
            file = tiny.files[version]
            real_engine.child.send(receive(one, file))
            one.send(file)
            assert one.says() == "sent"
            loaded = answer(real_engine)
            assert (loaded.policy_version, loaded.digest) == (version, file.digest)
            assert served(real_engine, ask, version, "group") == expected[version]


def test_after_a_rank_that_died_a_file_leaves_what_it_should(real_engine, ask, tiny):
    real_engine.load(1)
    expected = served(real_engine, ask, 1, "before-")
    with rank(timeout_s=3.0) as one:
        real_engine.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2], signal=signal.SIGKILL)
        assert answer(real_engine).is_dropped
        # nor is anything served that was there before
        assert_serves_nothing(real_engine, ask, 2)
    real_engine.load(1)
    assert served(real_engine, ask, 1, "after-") == expected


def test_a_rank_that_is_stopped_is_waited_for_so_long(real_engine, tiny):
    with rank(timeout_s=1.0) as one:
        real_engine.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2], signal=signal.SIGSTOP)
        failed = answer(real_engine)
        assert failed.is_dropped
        # whoever notices it first: we, or gloo
        words = "no progress for 1 s", "timeout", "Timed out"
        assert any(word in failed.reason for word in words), failed.reason
    real_engine.child.send(DropBroadcast())  # came too late: answered already
    real_engine.load(2)


def test_other_bytes_than_those_of_the_manifest_are_not_served(real_engine, tiny, ask):
    with rank() as one:
        real_engine.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2], is_wrong=True)
        failed = answer(real_engine)
        assert failed.is_dropped
        assert "digest differs" in failed.reason
    assert_serves_nothing(real_engine, ask, 2)
    real_engine.load(2)


@pytest.mark.parametrize("how", ["leaves", "loads"])
def test_what_is_not_wanted_any_more_is_dropped(real_engine, tiny, ask, how):
    real_engine.load(1)
    expected = served(real_engine, ask, 1, f"before-{how}-")
    with rank(timeout_s=200.0) as one:
        real_engine.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2], waits=True)
        assert one.says() == "waits"
        if how == "leaves":
            real_engine.child.send(DropBroadcast())
            failed = answer(real_engine)  # though the rank still waits
        else:
            failed = real_engine.load_file(tiny.files[1])  # the first answer is to the broadcast
        assert (failed.policy_version, failed.is_dropped) == (2, True)
        assert "not wanted" in failed.reason
        if how == "leaves":
            assert_serves_nothing(real_engine, ask, 2)
            real_engine.load(1)
        else:
            assert answer(real_engine).policy_version == 1
        assert served(real_engine, ask, 1, f"{how}-") == expected


def receive_while_busy(engine: Any, ask: Any, name: str, **fields: Any) -> Any:
    """The answer, to what came after some tokens of a response and before its end: again if it came
    too late."""
    file = engine.tiny.files[2]
    for _ in range(10):
        engine.load(1)
        with rank(timeout_s=3.0) as one:
            engine.generate(1, Sampling(1.0), ask(name, PROMPTS[1], LONG, seed=5))
            engine.until(lambda: name in engine.outcomes)
            engine.child.send(receive(one, file))
            one.send(file, **fields)
            said = answer(engine)
        if engine.outcomes[name].finish is None:
            return said
    pytest.fail(f"{name} was always over before")


def test_what_runs_goes_on_under_what_was_broadcast(real, tiny, ask):
    assert receive_while_busy(real, ask, "busy").policy_version == 2
    check_cut(real, tiny, "busy")


@pytest.mark.parametrize("end", ["loads", "aborted"])
def test_what_runs_waits_after_a_broadcast_that_failed(real, tiny, ask, end):
    name = f"busy-{end}"
    assert receive_while_busy(real, ask, name, signal=signal.SIGKILL).is_dropped
    if end == "loads":
        real.load(2)
        check_cut(real, tiny, name)
    else:
        real.abort((name, 1))
        [outcome] = real.finished(name)
        assert (outcome.finish, set(outcome.versions)) == ("abort", {1})
        real.load(2)


def check_cut(engine: Any, tiny: Any, name: str) -> None:
    """Tokens before the cut are exactly those of the old weights, those after it of the new."""
    prompt, [outcome] = PROMPTS[1], engine.finished(name)
    cut = outcome.versions.count(1)
    assert 0 < cut < LONG
    assert outcome.versions == [1] * cut + [2] * (LONG - cut)
    whole = prompt + outcome.tokens[:cut]
    # the noise of a token is that of its position in all
    assert outcome.tokens[:cut] == tiny.reference(1, prompt, 5, Sampling(1.0), cut)[0]
    num = min(30, LONG - cut)
    assert outcome.tokens[cut:][:num] == tiny.reference(2, whole, 5, Sampling(1.0), num)[0]


def test_a_canary_that_differs_speaks_against_the_version(real_engine, tiny, ask):
    real_engine.load(2)
    canary = Canary(pack_i32([3, 4, 5, 6]), pack_f32([-50.0] * 3), "float32")
    with rank() as one:
        real_engine.child.send(receive(one, tiny.files[2], canary))
        one.send(tiny.files[2])
        failed = answer(real_engine)
        assert (failed.policy_version, failed.is_dropped) == (2, False)
    assert_serves_nothing(real_engine, ask, 2)
    real_engine.load(1)


def nobody(address: str = "127.0.0.1:9") -> Membership:
    return Membership(BroadcastGroup("nobody", address, 1, 2, "gloo"), 1.0)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense"])
def test_an_engine_that_finds_nobody_says_so_and_goes_on(real_engine, ask, tiny, address):
    real_engine.load(1)
    real_engine.child.send(ReceiveWeights(replace(tiny.files[2], path=""), nobody(address)))
    failed = answer(real_engine)
    assert (failed.policy_version, failed.is_dropped) == (2, True)
    real_engine.load(1)
    assert len(served(real_engine, ask, 1, f"alone-{len(address)}-")) == len(PROMPTS)


def test_an_emulated_engine_has_nothing_to_receive_with(emulated_engine, tiny):
    assert emulated_engine.num_workers == 0
    emulated_engine.child.send(ReceiveWeights(tiny.files[1], nobody()))
    assert "no weights" in answer(emulated_engine).reason


def test_a_real_one_has_a_worker(real_engine):
    assert real_engine.num_workers == 1
