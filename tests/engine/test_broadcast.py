"""Engines as members of a broadcast group: what they serve after one, and after one that failed."""

import asyncio
import multiprocessing
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightrl.engine.base import EngineFailed, EngineLoaded, ProveWeights, ReceiveWeights
from lightrl.engine.group_answers import common_sums, require_joined
from lightrl.errors import WeightsError
from lightrl.messages.responses import Abort, Sampling
from lightrl.messages.weights import Canary
from lightrl.system.addresses import join_address
from lightrl.weights.broadcast.rendezvous import GroupJoined, JoinGroup, Membership, Unreachable
from lightrl.weights.version.manifest import VersionFile
from lightrl.wire import pack_f32, pack_i32
from tests.engine import broadcast_rank
from tests.engine.broadcast_rank import Order
from tests.engine.test_equality import PROMPTS
from tests.support.tiers import e2e

GREEDY = Sampling(0.0)
DROP = ProveWeights(())
LONG = 400  # tokens


@dataclass
class Rank:
    """One training rank in a process of its own, which sends what it is told to."""

    address: str
    place: Membership
    process: Any
    pipe: Any

    def send(self, file: VersionFile, at: int | None = None, number: int = 0) -> tuple[int, ...]:
        """Begins; the sums of what it sends."""
        self.pipe.send(Order(file, at, number))
        return self.says()

    def says(self) -> Any:
        assert self.pipe.poll(90)
        return self.pipe.recv()


@contextmanager
def rank(timeout_s: float = 20.0, world: int = 2, piece_bytes: int = 4096) -> Iterator[Rank]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([broadcast_rank.__name__])
    place = Membership(secrets.token_hex(16), 0, 1, world, "gloo", timeout_s, piece_bytes)
    ours, theirs = context.Pipe()
    process = context.Process(target=broadcast_rank.main, args=(place, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(90)
        yield Rank(join_address(*ours.recv()), replace(place, rank=1), process, ours)
    finally:
        ours.close()
        process.kill()
        process.join()


def join(engine: Any, one: Rank) -> None:
    engine.child.send(JoinGroup(one.address, one.place))
    assert _next(engine, GroupJoined) == GroupJoined(one.place.name)


def receive(one: Rank, file: VersionFile, canary: Canary | None = None) -> ReceiveWeights:
    """The order to do so; of the version only the manifest is where the engine is."""
    return ReceiveWeights(replace(file, path=""), one.place.name, canary)


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


@pytest.mark.parametrize("sums_come", ["after", *e2e(["before"])])
def test_a_broadcast_leaves_what_a_file_leaves(real_engine, ask, tiny, sums_come):
    expected = {}
    for version in (1, 2):
        real_engine.load(version)
        expected[version] = served(real_engine, ask, version, f"{sums_come}-{version}-")
    assert expected[1] != expected[2]
    with rank() as one:
        join(real_engine, one)
        for version in (1, 2, 1):  # one group lives for many
            file = tiny.files[version]
            real_engine.child.send(receive(one, file))
            sums = one.send(file, at=3)
            assert one.says() == "waits"
            if sums_come == "before":
                real_engine.child.send(ProveWeights(sums))
            one.pipe.send("go on")
            assert one.says() == "sent"
            if sums_come == "after":
                real_engine.child.send(ProveWeights(sums))
            loaded = answer(real_engine)
            assert (loaded.policy_version, loaded.digest) == (version, file.digest)
            assert served(real_engine, ask, version, "group") == expected[version]


@pytest.mark.parametrize("at", [7, *e2e([0, 3, 14, 23])])
def test_after_a_rank_that_died_in_the_middle_a_file_leaves_what_it_should(
    real_engine, ask, tiny, at
):
    real_engine.load(1)
    expected = served(real_engine, ask, 1, f"before{at}-")
    with rank() as one:
        join(real_engine, one)
        real_engine.child.send(receive(one, tiny.files[2]))
        real_engine.child.send(ProveWeights(one.send(tiny.files[2], at, signal.SIGKILL)))
        failed = answer(real_engine)
        assert failed.is_dropped
        assert "member 0 is gone" in failed.reason
        # nor is anything served that was there before
        assert_serves_nothing(real_engine, ask, 2)
    real_engine.load(1)
    assert served(real_engine, ask, 1, f"after{at}-") == expected


def test_a_rank_that_is_stopped_is_waited_for_so_long(real_engine, ask, tiny):
    with rank(timeout_s=1.0) as one:
        join(real_engine, one)
        real_engine.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2], 7, signal.SIGSTOP)
        failed = answer(real_engine)
        assert failed.is_dropped
        # whoever notices it first: we, or gloo
        words = "no progress for 1 s", "timeout", "Timed out"
        assert any(word in failed.reason for word in words), failed.reason
    real_engine.child.send(DROP)  # came too late: answered already
    real_engine.load(2)


def test_other_sums_than_those_of_the_ranks_are_not_served(real_engine, tiny, ask):
    with rank() as one:
        join(real_engine, one)
        real_engine.child.send(receive(one, tiny.files[2]))
        sums = one.send(tiny.files[2])
        real_engine.child.send(ProveWeights((sums[0] ^ 1, *sums[1:])))
        failed = answer(real_engine)
        assert failed.is_dropped
        assert "is not what the ranks sent" in failed.reason
    assert_serves_nothing(real_engine, ask, 2)
    real_engine.load(2)


def test_what_is_not_wanted_any_more_is_dropped_and_the_ranks_learn_it(real_engine, tiny, ask):
    """Before it comes, while it comes, and when it is there and nobody has said what was sent."""
    real_engine.load(1)
    expected = served(real_engine, ask, 1, "before-")
    for when in ("before", "while", "after"):
        with rank() as one:
            join(real_engine, one)
            if when == "before":
                real_engine.child.send(DROP)
                one.send(tiny.files[2])
                assert "not wanted" in one.says()
                assert served(real_engine, ask, 1, "goes-on-") == expected
                continue
            real_engine.child.send(receive(one, tiny.files[2]))
            one.send(tiny.files[2], 7)
            assert one.says() == "waits"
            if when == "after":
                one.pipe.send("go on")
                assert one.says() == "sent"
            real_engine.child.send(DROP)
            failed = answer(real_engine)  # though the rank still waits
            assert (failed.policy_version, failed.is_dropped) == (2, True)
            if when == "after":
                one.send(tiny.files[1])
            else:
                one.pipe.send("go on")
            assert "not wanted" in one.says()
            assert_serves_nothing(real_engine, ask, 2)
            real_engine.load(1)
            assert served(real_engine, ask, 1, f"{when}-") == expected


def test_another_load_drops_what_was_not_proved(real_engine, tiny, ask):
    """Joining another group does not."""
    with rank() as one, rank() as other:
        for loads in (True, False):
            member = one if loads else other
            join(real_engine, member)
            real_engine.child.send(receive(member, tiny.files[2]))
            sums = member.send(tiny.files[2])
            assert member.says() == "sent"
            if loads:
                real_engine.load_file(tiny.files[1])  # its first answer is to the broadcast
                assert answer(real_engine).policy_version == 1
                real_engine.child.send(ProveWeights(sums))  # to nothing
                assert len(served(real_engine, ask, 1, "loaded-")) == len(PROMPTS)
            else:
                with rank() as third:
                    join(real_engine, third)
                    real_engine.child.send(ProveWeights(sums))
                    assert answer(real_engine).policy_version == 2


def test_an_engine_does_not_wait_for_ever_until_somebody_says_what_was_sent(real_engine, tiny, ask):
    with rank(timeout_s=1.0) as one:
        join(real_engine, one)
        real_engine.child.send(receive(one, tiny.files[2]))
        sums = one.send(tiny.files[2])
        failed = answer(real_engine)
        assert failed.is_dropped
        assert "nobody has said" in failed.reason
        real_engine.child.send(ProveWeights(sums))
    real_engine.load(1)


def test_orders_that_come_meanwhile_do_not_make_it_wait_longer(real_engine, tiny):
    async def answer_while_orders_come() -> Any:
        async def order() -> None:
            while True:
                real_engine.child.send(Abort(()))
                await asyncio.sleep(0.1)

        ordering = asyncio.create_task(order())
        try:
            async with asyncio.timeout(90.0):
                while not isinstance(event := await real_engine.child.receive(), EngineFailed):
                    pass
                return event
        finally:
            ordering.cancel()

    with rank(timeout_s=1.0) as one:
        join(real_engine, one)
        real_engine.child.send(receive(one, tiny.files[2]))
        one.send(tiny.files[2])
        assert one.says() == "sent"
        failed = real_engine.together(answer_while_orders_come())
        assert "nobody has said" in failed.reason
    real_engine.load(1)


def receive_while_busy(
    engine: Any, ask: Any, name: str, at: int | None = None, number: int = 0
) -> Any:
    """The answer, to what came after some tokens of a response and before its end: again if it came
    too late."""
    file = engine.tiny.files[2]
    for _ in range(10):
        engine.load(1)
        with rank() as one:
            join(engine, one)
            engine.generate(1, Sampling(1.0), ask(name, PROMPTS[1], LONG, seed=5))
            engine.until(lambda: name in engine.outcomes)
            engine.child.send(receive(one, file))
            sums = one.send(file, at, number)
            engine.child.send(ProveWeights(sums))
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
    assert receive_while_busy(real, ask, name, 7, signal.SIGKILL).is_dropped
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
        join(real_engine, one)
        real_engine.child.send(receive(one, tiny.files[2], canary))
        real_engine.child.send(ProveWeights(one.send(tiny.files[2])))
        failed = answer(real_engine)
        assert (failed.policy_version, failed.is_dropped) == (2, False)
    assert_serves_nothing(real_engine, ask, 2)
    real_engine.load(1)


@contextmanager
def unanswered() -> Iterator[str]:
    """An address where whoever connects waits for ever: as where packets are dropped."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):  # the only one that is let wait
            yield join_address(*address)


def test_an_engine_that_finds_nobody_says_so_and_goes_on(real_engine, ask, tiny):
    """A closed port says nothing of the trainer's machine: the group may be over. Where nobody
    answers, it cannot be reached."""
    real_engine.load(1)
    place = Membership("nobody", 1, 1, 2, "gloo", 1.0)
    with unanswered() as silent:
        for address, is_unreachable in (("127.0.0.1:9", False), (silent, True)):
            real_engine.child.send(JoinGroup(address, place))
            joined = _next(real_engine, GroupJoined)
            assert joined.is_unreachable == is_unreachable
            assert address in joined.error
    assert len(served(real_engine, ask, 1, "alone")) == len(PROMPTS)
    real_engine.child.send(ReceiveWeights(replace(tiny.files[1], path=""), "nobody"))
    assert "not a member" in answer(real_engine).reason
    real_engine.load(1)


def test_a_member_that_does_not_come_is_no_reason_to_give_the_address_up(real_engine):
    with rank(timeout_s=1.0, world=3) as one:
        real_engine.child.send(JoinGroup(one.address, one.place))
        joined = _next(real_engine, GroupJoined)
        assert joined.error
        assert not joined.is_unreachable


def test_an_emulated_engine_has_nothing_to_receive_with(emulated_engine, tiny):
    assert emulated_engine.num_workers == 0
    emulated_engine.child.send(JoinGroup("127.0.0.1:9", Membership("x", 1, 1, 2, "gloo", 2.0)))
    assert "no weights" in _next(emulated_engine, GroupJoined).error


def test_a_real_one_has_a_worker(real_engine):
    assert real_engine.num_workers == 1


def test_of_several_workers_all_must_have_come_and_received_the_same():
    require_joined([("", False), ("", False)])
    with pytest.raises(WeightsError, match="timed out") as found:
        require_joined([("", False), ("timed out", False)])
    assert not isinstance(found.value, Unreachable)
    with pytest.raises(Unreachable, match="refused"):
        require_joined([("timed out", False), ("refused", True)])
    assert common_sums([((1, 2), ""), ((1, 2), "")]) == (1, 2)
    with pytest.raises(WeightsError, match="different"):
        common_sums([((1, 2), ""), ((1, 3), "")])
    with pytest.raises(WeightsError, match="gone"):
        common_sums([((1, 2), ""), ((), "member 0 is gone")])
