import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrl.config.algorithm import AlgorithmSection
from lightrl.trainer.batch import (
    micro_batches,
    num_tokens,
    plan,
    plan_micro_batches,
    plan_packed,
    surprisal_of_rest,
    with_gradient,
)
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import pack_f32, pack_i32

LENGTHS = st.lists(st.integers(1, 3000), max_size=120)


def cost(rows, lengths):
    return len(rows) * max((lengths[i] for i in rows), default=0)


def test_plan_by_hand():
    assert plan([3, 9, 3, 3], ranks=2, max_tokens=9) == [[(1,)], [(3, 2, 0)]]


def test_a_lone_batch_is_split_so_that_no_rank_is_idle():
    assert plan([5, 5, 5, 5], ranks=2, max_tokens=100) == [[(1, 0)], [(3, 2)]]


def test_ranks_without_samples_get_empty_batches():
    assert plan([4], ranks=3, max_tokens=100) == [[(0,)], [()], [()]]
    assert plan([], ranks=2, max_tokens=100) == [[], []]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 8000))
def test_every_sample_is_planned_once_within_the_budget(lengths, ranks, max_tokens):
    plans = plan(lengths, ranks, max_tokens)
    assert sorted(i for batches in plans for rows in batches for i in rows) == list(
        range(len(lengths))
    )
    for rows in (rows for batches in plans for rows in batches if len(rows) > 1):
        assert cost(rows, lengths) <= max_tokens


@given(LENGTHS, st.integers(1, 5), st.integers(1, 8000))
def test_ranks_are_balanced_and_meet_equally_often(lengths, ranks, max_tokens):
    plans = plan(lengths, ranks, max_tokens)
    assert len({len(batches) for batches in plans}) == 1
    loads = [sum(cost(rows, lengths) for rows in batches) for batches in plans]
    largest = max((cost(rows, lengths) for batches in plans for rows in batches), default=0)
    assert max(loads) - min(loads) <= largest


def test_plan_packed_by_hand():
    assert plan_packed([3, 9, 3, 3], ranks=2, max_tokens=12) == [[(0, 2, 3)], [(1,)]]
    assert plan_packed([4], ranks=3, max_tokens=100) == [[(0,)], [()], [()]]
    assert plan_packed([], ranks=2, max_tokens=100) == [[], []]
    assert plan_packed([50, 1], ranks=1, max_tokens=10) == [[(0,), (1,)]]  # alone, if too long


@given(LENGTHS, st.integers(1, 5), st.integers(1, 8000))
def test_packed_samples_are_planned_once_within_the_budget(lengths, ranks, max_tokens):
    plans = plan_packed(lengths, ranks, max_tokens)
    batches = [rows for batches in plans for rows in batches]
    assert sorted(i for rows in batches for i in rows) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in rows) for rows in batches]
    assert all(size <= max_tokens for size, r in zip(sizes, batches, strict=True) if len(r) > 1)
    assert len({len(batches) for batches in plans}) == 1
    loads = [sum(lengths[i] for rows in batches for i in rows) for batches in plans]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    if max(lengths, default=0) * 2 <= max_tokens:
        assert len(batches) <= 2 * sum(lengths) / max_tokens + ranks


@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([4096, 8192, 16384]))
def test_packed_batches_are_nearly_full(seed, ranks, max_tokens):
    """Lengths of 20 to 4,000 tokens, log-normal: as those of responses are."""
    rng = random.Random(seed)
    lengths = [round(min(4000, max(20, rng.lognormvariate(6, 1)))) for _ in range(256)]
    plans = plan_packed(lengths, ranks, max_tokens)
    num_batches = sum(map(len, plans))
    assert num_batches <= 1.25 * sum(lengths) / max_tokens + ranks


@pytest.mark.parametrize(
    ("algorithm", "kept"),
    [
        ({}, ["signal"]),
        ({"kl_coef": 0.1}, ["signal", "none"]),
        ({"entropy_coef": 0.1}, ["signal", "none"]),
        ({"name": "reinforce++"}, ["signal", "none"]),  # 0 is not their mean
    ],
)
def test_samples_without_gradient_are_left_out(algorithm, kept):
    tokens, logprobs = pack_i32([5, 6]), pack_f32([-1, -1])
    samples = [
        TrainSample("signal", tokens, tokens, logprobs, -0.5),
        TrainSample("none", tokens, tokens, logprobs, 0.0),
        TrainSample("empty", tokens, b"", b"", 0.5),
    ]
    assert [s.response for s in with_gradient(samples, AlgorithmSection(**algorithm))] == kept


def test_packed_micro_batches_are_the_samples_of_the_plan(samples):
    ranks = micro_batches(samples, ranks=2, max_tokens=60)
    sent = [s for batches in ranks for batch in batches for s in batch]
    assert sorted(s.response for s in sent) == sorted(s.response for s in samples)
    assert all(sum(map(num_tokens, batch)) <= 60 for batches in ranks for batch in batches)


def test_a_plan_by_hand(samples):
    a, b, c = sorted(samples[:3], key=num_tokens, reverse=True)
    assert plan_micro_batches([[a, b], [c]], 2, 99, deterministic=True) == [
        ((a,), (c,)),
        ((b,), ()),
    ]
    assert (
        plan_micro_batches([[], []], 2, 99, deterministic=True)
        == plan_micro_batches([], 2, 99, False)
        == [(), ()]
    )
    assert plan_micro_batches([[c], [b, a]], 1, 99, deterministic=False) == micro_batches(
        [c, b, a], 1, 99
    )


@given(st.integers(1, 3), st.integers(1, 200), st.lists(st.integers(1, 24), max_size=8))
def test_deterministic_batches_do_not_depend_on_how_many_groups_wait(
    samples, ranks, max_tokens, cuts
):
    groups = [samples[i : i + 3] for i in range(0, 24, 3)]
    borders = [0, *sorted(c % 9 for c in cuts), 8]
    streams = [
        plan_micro_batches(groups[begin:end], ranks, max_tokens, deterministic=True)
        for begin, end in pairwise(borders)
    ]
    joined = [tuple(batch for stream in streams for batch in stream[rank]) for rank in range(ranks)]
    assert joined == plan_micro_batches(groups, ranks, max_tokens, deterministic=True)
    assert len({len(batches) for batches in joined}) == 1


def test_micro_batches_are_the_samples_of_the_plan(samples):
    ranks = micro_batches(samples, ranks=2, max_tokens=60, packed=False)
    sent = [s for batches in ranks for batch in batches for s in batch]
    assert sorted(s.response for s in sent) == sorted(s.response for s in samples)
    assert all(
        num_tokens(batch[0]) == max(map(num_tokens, batch)) for b in ranks for batch in b if batch
    )


def test_the_surprisal_of_the_rest_is_of_its_trained_tokens():
    def one(advantage, logprobs, mask=b""):
        tokens = pack_i32([3] * len(logprobs))
        return TrainSample("p#0", b"", tokens, pack_f32(logprobs), advantage, loss_mask=mask)

    flat = [one(0.0, [-1.0, -2.0]), one(0.0, [-9.0, -4.0, -8.0], b"\x02")]
    samples = [one(1.0, [-5.0]), *flat, one(0.0, [-0.5]), one(1.0, [-7.0], b"\x00")]
    assert surprisal_of_rest(samples, AlgorithmSection()) == [7.5, 4]
    assert surprisal_of_rest(samples, AlgorithmSection(kl_coef=0.1)) == [0.0, 0]
    assert surprisal_of_rest([], AlgorithmSection()) == [0.0, 0]
