"""The rules by which pullers help each other, without a socket or a clock."""

import random

import pytest

from lightrl.weights.pull.swarm import (
    EVERYTHING,
    MAX_REFUSALS,
    STALL_S,
    BucketTransfer,
    PullSource,
    SourceChoice,
)

NUM = 40
SIZE = 8 << 20


def a_source(node: str, has: int = 0, *, is_known: bool = True) -> PullSource:
    return PullSource(node, (("h", 1),), b"t", has=has, is_known=is_known)


def bits(*buckets: int) -> int:
    return sum(1 << b for b in buckets)


def a_swarm(*sources: PullSource, seed: int = 0, streams: int = 4, num: int = NUM) -> SourceChoice:
    swarm = SourceChoice(num, seed, streams)
    swarm.sources = list(sources)
    return swarm


def take(swarm: SourceChoice, now: float = 0.0) -> BucketTransfer | None:
    chosen = swarm.choose(now)
    return None if chosen is None else swarm.begin(*chosen, SIZE, now)


def test_a_node_without_peers_asks_the_origin_with_all_its_streams():
    swarm = a_swarm(a_source("trainer", EVERYTHING), streams=3, num=5)
    taken = [take(swarm) for _ in range(3)]
    assert len({t.bucket for t in taken if t}) == 3
    assert take(swarm) is None


def test_nothing_is_asked_of_who_has_not_said_what_it_has():
    assert take(a_swarm(a_source("trainer"))) is None


def test_what_a_peer_has_is_not_asked_of_the_origin():
    peer, origin = a_source("a", bits(*range(NUM))), a_source("trainer", EVERYTHING)
    swarm = a_swarm(peer, origin)
    assert {t.source.node for t in [take(swarm) for _ in range(NUM)] if t} == {"a"}
    assert take(swarm) is None


def test_what_a_peer_is_getting_is_waited_for_but_not_for_ever():
    peer, origin = a_source("a"), a_source("trainer", EVERYTHING)
    peer.getting = bits(*range(NUM))
    peer.news_at = 10.0
    swarm = a_swarm(peer, origin)
    assert take(swarm, now=10.5) is None
    late = take(swarm, now=12.0)
    assert late is not None
    assert late.source is origin


def test_a_swarm_takes_one_stream_of_the_origin_for_each_puller():
    peers = [a_source(f"n{k}") for k in range(7)]
    swarm = a_swarm(*peers, a_source("trainer", EVERYTHING))
    assert take(swarm) is not None
    assert take(swarm) is None
    for peer in peers:  # none of them comes
        peer.failures = 1
    assert take(swarm) is not None


def test_the_least_busy_peer_is_asked_first_and_the_rare_bucket():
    everywhere = bits(0, 1, 2)
    peers = [a_source(node, everywhere) for node in ("a", "b", "c")]
    peers[0].has |= bits(7)
    swarm = a_swarm(*peers, a_source("trainer", 0))
    taken = {t.source.node: t.bucket for t in (take(swarm) for _ in peers) if t}
    assert set(taken) == {"a", "b", "c"}
    assert taken["a"] == 7


def test_who_sent_wrong_bytes_or_refuses_is_not_asked():
    bad, refusing = a_source("bad", EVERYTHING), a_source("refusing", EVERYTHING)
    bad.is_bad, refusing.refusals = True, MAX_REFUSALS
    swarm = a_swarm(bad, refusing, a_source("trainer", EVERYTHING))
    chosen = take(swarm)
    assert chosen is not None
    assert chosen.source.node == "trainer"


@pytest.mark.parametrize(("has_other", "is_overdue"), [(EVERYTHING, True), (0, False)])
def test_what_stalls_is_asked_of_another_if_there_is_one(has_other, is_overdue):
    stalled = a_source("stalled", EVERYTHING)
    swarm = a_swarm(stalled, a_source("trainer", has_other))
    transfer = take(swarm)
    assert transfer is not None
    assert transfer.source is stalled
    transfer.received, transfer.last_at = SIZE // 2, 0.1  # and nothing since
    assert not swarm.is_overdue(transfer, STALL_S)
    assert swarm.is_overdue(transfer, 0.1 + STALL_S + 0.01) == is_overdue


def test_what_drips_is_asked_of_another():
    slow, quick = a_source("slow", bits(0)), a_source("quick", bits(0))
    quick.rate = 1e8
    swarm = a_swarm(slow, quick, a_source("trainer", 0))
    transfer = swarm.begin(slow, 0, SIZE, 0.0)
    transfer.received, transfer.last_at = 100_000, 0.8
    assert swarm.is_overdue(transfer, 0.8)
    transfer.received = 7 << 20  # nearly done
    assert not swarm.is_overdue(transfer, 0.8)


def test_what_was_stolen_is_done_by_another_and_patience_grows():
    one, two = a_source("one", EVERYTHING), a_source("two", EVERYTHING)
    swarm = a_swarm(one, two, a_source("trainer", 0), num=1)
    transfer = swarm.begin(one, 0, SIZE, 0.0)
    swarm.steal(transfer, 1.0)
    swarm.end(transfer, 1.0, is_whole=False)
    again = take(swarm, 1.0)
    assert again is not None
    assert again.source is two
    assert not swarm.is_overdue(again, 1.0 + STALL_S + 0.01)


def test_pullers_begin_in_different_places():
    firsts = set[int]()
    for seed in range(8):
        first = take(a_swarm(a_source("trainer", EVERYTHING), seed=seed))
        assert first is not None
        firsts.add(first.bucket)
    assert len(firsts) >= 5


def test_pullers_ask_a_peer_for_different_buckets():
    """Else one that is slow sends the same to each of them, and they have nothing to relay."""
    asked = set[int]()
    for seed in range(8):
        swarm = a_swarm(a_source("slow", EVERYTHING), a_source("trainer", 0), seed=seed)
        first = take(swarm)
        assert first is not None
        assert first.source.node == "slow"
        asked.add(first.bucket)
    assert len(asked) >= 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_pullers", [2, 8, 20])
def test_many_pullers_ask_the_origin_for_little_more_than_one_version(seed: int, num_pullers: int):
    """In rounds: each stream of each puller moves one bucket, and what is proved is known."""
    rng = random.Random(seed)
    origin_sent = rounds = 0
    swarms = [
        a_swarm(
            *(a_source(f"n{i}") for i in range(num_pullers) if i != k),
            a_source("trainer", EVERYTHING),
            seed=k,
        )
        for k in range(num_pullers)
    ]
    proved = [0] * num_pullers
    while any(s.todo for s in swarms):
        rounds += 1
        now = float(rounds)
        transfers: list[tuple[int, BucketTransfer]] = []
        for k in rng.sample(range(num_pullers), num_pullers):
            while len([1 for j, _ in transfers if j == k]) < 4 and (t := take(swarms[k], now)):
                transfers.append((k, t))
                if t.source.has == EVERYTHING:
                    origin_sent += 1
                    tell(swarms, k, getting=t.bucket, now=now)
        for k, t in transfers:
            t.received = SIZE
            swarms[k].end(t, now + 0.5, is_whole=True)
            proved[k] |= 1 << t.bucket
            tell(swarms, k, has=proved[k], now=now)
        assert rounds < 20 * NUM
    assert origin_sent <= 1.25 * NUM


def tell(
    swarms: list[SourceChoice], k: int, *, has: int = 0, getting: int = -1, now: float
) -> None:
    for swarm in swarms:
        for s in swarm.sources[:-1]:
            if s.node == f"n{k}":
                s.news_at, s.has = now, s.has | has
                if getting >= 0:
                    s.getting |= 1 << getting
                s.getting &= ~s.has
