"""Merged facts mean what the facts meant: compared with a reader that takes them one by one."""

import random

import pytest

from lightrl.core.events import ResponseScored
from lightrl.core.log_entries import LogEntry, RoundOpened, TokensTaken
from lightrl.errors import ProtocolError
from lightrl.journal import merge as merging
from lightrl.journal.codec import LOG, PackedTokens
from lightrl.journal.merge import merge
from lightrl.messages.responses import ResponseTokens
from tests.journal.conftest import item, tokens_of


def scored(name: str) -> ResponseScored:
    return ResponseScored(name, 1, 1.0)


def test_consecutive_tokens_become_one_item_a_response_and_scores_follow():
    facts: list[LogEntry] = [
        TokensTaken(3, (item("a", 0, 2), item("b", 0, 1))),
        TokensTaken(3, (item("b", 1, 1, how="stop"), item("a", 2, 2))),
        scored("b"),
        TokensTaken(3, (item("a", 4, 1, attempt=2, how="length"),)),
        RoundOpened(3, "plain"),
        TokensTaken(3, (item("c", 0, 1),)),
    ]
    assert list(merge(facts)) == [
        TokensTaken(3, (item("a", 0, 5, attempt=2, how="length"), item("b", 0, 2, how="stop"))),
        scored("b"),
        RoundOpened(3, "plain"),
        TokensTaken(3, (item("c", 0, 1),)),
    ]


def test_each_version_keeps_its_tokens():
    facts: list[LogEntry] = [
        TokensTaken(3, (item("a", 0, 2), item("b", 0, 2))),
        TokensTaken(4, (item("a", 2, 2),)),
        TokensTaken(3, (item("b", 2, 2),)),
        TokensTaken(4, (item("b", 4, 2),)),
    ]
    assert list(merge(facts)) == [
        TokensTaken(3, (item("a", 0, 2), item("b", 0, 4))),
        TokensTaken(4, (item("a", 2, 2), item("b", 4, 2))),
    ]


def test_a_response_that_goes_on_under_an_older_version_stays_in_order():
    facts: list[LogEntry] = [
        TokensTaken(3, (item("b", 0, 1),)),
        TokensTaken(4, (item("a", 0, 2),)),
        TokensTaken(3, (item("a", 2, 2, attempt=2), item("b", 1, 1))),
    ]
    merged = list(merge(facts))
    assert tokens_of(merged) == tokens_of(facts)
    assert sum(len(f.items) for f in merged if isinstance(f, TokensTaken)) == 3


def test_what_was_sent_twice_counts_once():
    facts: list[LogEntry] = [
        TokensTaken(3, (item("a", 0, 4), item("b", 0, 4))),
        TokensTaken(3, (item("a", 0, 6, attempt=2),)),
        TokensTaken(3, (item("a", 3, 1, attempt=3, how="stop"),)),
    ]
    merged = list(merge(facts))
    assert tokens_of(merged) == tokens_of(facts)


def test_nothing_and_items_without_tokens():
    assert list(merge([])) == []
    end: LogEntry = TokensTaken(1, (item("a", 0, 0, how="abort"),))
    assert list(merge([TokensTaken(1, ()), end])) in ([end], [TokensTaken(1, ()), end])
    assert tokens_of(list(merge([end]))) == tokens_of([end])


def story(rng: random.Random) -> list[LogEntry]:
    """Of some responses on some nodes: moves, versions that come and go, resends, scores
    between."""
    held = {f"p{k}@0#{k % 3}": 0 for k in range(rng.randrange(1, 9))}
    attempt = dict.fromkeys(held, 1)
    version, facts = 5, list[LogEntry]()
    for _ in range(rng.randrange(1, 60)):
        draw = rng.random()
        if draw < 0.1:
            facts.append(scored(rng.choice(list(held))))
        elif draw < 0.14:
            facts.append(RoundOpened(version, "plain"))
        elif draw < 0.2:
            version += 1
        else:
            items: list[ResponseTokens] = []
            for name in rng.sample(list(held), rng.randrange(1, len(held) + 1)):
                again = rng.randrange(held[name] + 1) if rng.random() < 0.05 else 0
                attempt[name] += rng.random() < 0.1
                count = again + rng.randrange(6)
                how = "abort" if rng.random() < 0.1 else None
                items.append(item(name, held[name] - again, count, attempt[name], how))
                held[name] += count - again
            facts.append(TokensTaken(version - (rng.random() < 0.2), tuple(items)))
    return facts


@pytest.mark.parametrize(("gather", "long"), [(1, 256), (7, 2), (1 << 14, 256)])
def test_random_stories_mean_the_same(gather, long, monkeypatch):
    monkeypatch.setattr(merging, "GATHER_ITEMS", gather)
    monkeypatch.setattr(merging, "LONG_TOKENS", long)
    for seed in range(150):
        facts = story(random.Random(seed))
        merged = list(merge(facts))
        assert tokens_of(merged) == tokens_of(facts), seed
        others = [f for f in facts if not isinstance(f, TokensTaken)]
        assert [f for f in merged if not isinstance(f, TokensTaken)] == others, seed
        for k, fact in enumerate(facts):
            if isinstance(fact, RoundOpened):  # and at each such point, too
                here = merged.index(fact) if others.count(fact) == 1 else None
                assert here is None or tokens_of(merged[:here]) == tokens_of(facts[:k]), seed
        assert tokens_of(list(merge(merged))) == tokens_of(facts), seed


def test_more_responses_than_the_small_sort_can_hold():
    facts: list[LogEntry] = []
    for offset in (0, 1):
        facts += [TokensTaken(1, tuple(item(f"r{k}", offset, 1) for k in range(70_000)))]
    [merged] = merge(facts)
    assert isinstance(merged, TokensTaken)
    assert len(merged.items) == 70_000
    assert merged.items[69_999] == item("r69999", 0, 2)


# On the disk


def test_packed_tokens_are_the_tokens():
    for seed in range(300):
        for fact in story(random.Random(seed)):
            assert LOG.decode(LOG.encode(fact)) == fact


def test_ids_with_separators_are_no_trouble():
    fact = TokensTaken(1, (item("a\0b", 0, 2), item("b", 0, 1), item("ü\n", 0, 1)))
    assert LOG.decode(LOG.encode(fact)) == fact
    for small in (TokensTaken(1, ()), TokensTaken(1, (item("b", 0, 1),))):
        assert LOG.decode(LOG.encode(small)) == small
    assert tokens_of(list(merge([fact]))) == tokens_of([fact])


@pytest.mark.parametrize(
    "columns",
    [
        ("a", bytes(4), bytes(4), bytes(8), b"", b""),
        ("a\0b", bytes(4), bytes(4), bytes(4), b"", b""),
        ("a", bytes(4), bytes(4), b"\x01\0\0\0", b"", b""),
        ("a", bytes(4), bytes(4), b"\x01\0\0\0", bytes(4), b""),
        ("a\0b", bytes(8), bytes(8), b"\x01\0\0\0\xff\xff\xff\xff", b"", b""),
    ],
)
def test_columns_that_do_not_fit_are_a_protocol_error(columns):
    names, attempts, offsets, counts, ids, logprobs = columns
    packed = PackedTokens(1, names, attempts, offsets, counts, (), ids, logprobs)
    with pytest.raises(ProtocolError):
        LOG.decode(LOG.packed.encode(packed))
