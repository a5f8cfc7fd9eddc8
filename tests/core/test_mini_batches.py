"""Which update of its step a group belongs to, and when it is sent."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest

from lightrl.core.commands import Command
from lightrl.core.rounds import mini_batches
from lightrl.core.state import DrawnPrompt, Group, GroupState, Round, RoundState
from lightrl.messages.responses import Sampling
from lightrl.messages.training import TrainGroup, TrainShard
from tests.core.conftest import SETTINGS, Driver, sent

PROMPTS = 16


def new(**changes: Any) -> Driver:
    sizes = {"prompts_per_step": PROMPTS, "group_size": 1, "mini_batches": 4, "num_steps": 3}
    d = Driver(False, **sizes | changes)
    d.start("a", slots=64)
    return d


def groups_in(commands: list[Command]) -> list[TrainGroup]:
    return [g for _, shard in sent(commands, TrainShard) for g in shard.groups]


def finish(d: Driver, order: Sequence[str], unscored: Sequence[str] = ()) -> list[TrainGroup]:
    return [g for r in order for g in groups_in(d.finish(r, None if r in unscored else 1.0))]


def labels_of(groups: Sequence[TrainGroup]) -> dict[str, int]:
    return {g.group: g.mini_batch for g in groups}


def sizes_of(groups: Sequence[TrainGroup]) -> list[int]:
    labels = [g.mini_batch for g in groups]
    assert labels == sorted(labels), "the groups of a mini-batch follow each other"
    return [labels.count(k) for k in range(max(labels) + 1)]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_mini_batches_do_not_depend_on_who_comes_first(is_deterministic: bool):
    found: list[list[dict[str, int]]] = []
    for seed in range(3):
        d, steps = new(deterministic=is_deterministic), list[dict[str, int]]()
        for step in range(2):
            order = random.Random(seed).sample(d.running(), PROMPTS)
            groups = finish(d, order)
            assert sizes_of(groups) == [4, 4, 4, 4]
            steps.append(labels_of(groups))
            d.train(step)
            d.confirm("a", step + 1)
        found.append(steps)
    assert found[0] == found[1] == found[2]
    first, second = ([labels[name] for name in sorted(labels)] for labels in found[0])
    assert first != second  # each step has a permutation of its own
    other = new(run_seed=1)
    assert labels_of(finish(other, other.running())) != found[0][0]


def test_a_deterministic_step_is_sent_in_one_order():
    orders: list[list[str]] = []
    for seed in range(3):
        d = new(deterministic=True)
        order = random.Random(seed).sample(d.running(), PROMPTS)
        orders.append([g.group for g in finish(d, order)])
    assert orders[0] == orders[1] == orders[2]


def test_a_mini_batch_is_sent_when_all_before_it_are_complete():
    d = new()
    came: list[str] = []
    for response in d.running():
        groups = groups_in(d.finish(response))
        came.append(response.partition("#")[0])
        assert {g.group for g in groups} <= set(came)
        for earlier, later in pairwise(d.round.in_turn):
            assert (earlier.mini_batch or 0) <= (later.mini_batch or 0)
        labels = [g.mini_batch or 0 for g in d.round.in_turn]
        full = [labels.count(k) == 4 for k in range(4)]
        assert all(full[: max(labels, default=0)])
    assert len(d.round.in_turn) == PROMPTS


def test_groups_of_the_first_mini_batch_do_not_wait():
    d = new()
    labels = labels_of(finish(new(), d.running()))
    first = [f"{name}#0" for name, label in labels.items() if label == 0]
    assert len(finish(d, first)) == 4


def test_arrival_cuts_the_step_as_groups_come():
    d = new(mini_batch_order="arrival")
    order = random.Random(4).sample(d.running(), PROMPTS)
    sent_after = [len(finish(d, [response])) for response in order]
    # The next mini-batch begins with half of its groups: a remainder of fewer joins this one.
    assert sent_after == [1, 1, 1, 1, 0, 2, 1, 1, 0, 2, 1, 1, 0, 2, 1, 1]
    in_turn = [g.id for g in d.round.in_turn]
    assert in_turn == [r.partition("#")[0] for r in order]
    assert [g.mini_batch for g in d.round.in_turn] == [k // 4 for k in range(PROMPTS)]


@pytest.mark.parametrize("order", ["random", "arrival"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(
    ("num_groups", "sizes"),
    [
        (16, [4, 4, 4, 4]),
        (15, [4, 4, 4, 3]),
        (14, [4, 4, 4, 2]),  # half a mini-batch
        (13, [4, 4, 5]),
        (12, [4, 4, 4]),
        (9, [4, 5]),
        (6, [4, 2]),
        (5, [5]),
        (4, [4]),
        (1, [1]),
    ],
)
def test_a_small_remainder_joins_the_mini_batch_before(
    order: str, is_deterministic: bool, num_groups: int, sizes: list[int]
):
    for seed in range(3):
        d = new(mini_batch_order=order, deterministic=is_deterministic)
        names = random.Random(seed).sample(d.running(), PROMPTS)
        lost = random.Random(seed + 9).sample(names, PROMPTS - num_groups)
        groups = finish(d, names, lost)
        assert len(groups) == num_groups
        assert sizes_of(groups) == sizes


def test_a_step_without_groups_ends():
    d = new()
    shards = [s for r in d.running() for _, s in sent(d.finish(r, None), TrainShard)]
    assert [(s.groups, s.last) for s in shards] == [((), True)]


@pytest.mark.parametrize("order", ["random", "arrival"])
def test_one_mini_batch_is_the_step_as_it_came(order: str):
    d = new(mini_batches=1, mini_batch_order=order)
    names = random.Random(1).sample(d.running(), PROMPTS)
    assert [len(finish(d, [response])) for response in names] == [1] * PROMPTS
    assert {g.mini_batch for g in d.round.in_turn} == {0}


@pytest.mark.parametrize("num_before", [0, 3, 9, 14, 16])
def test_a_step_that_is_fed_again_has_the_same_mini_batches(num_before: int):
    expected = labels_of(finish(d := new(), d.running()))
    for who in ("trainer", "coordinator"):
        d = new()
        order = random.Random(num_before).sample(d.running(), PROMPTS)
        early = labels_of(finish(d, order[:num_before]))
        assert early.items() <= expected.items()
        if who == "trainer":
            d.join("t", "trainer", incarnation=2)
            again = groups_in(d.publish(0))
        else:
            d.restart()
            d.join("t", "trainer")
            again = groups_in(d.publish(0))
            d.join("a", slots=64, serves=0, running=dict.fromkeys(order[num_before:], 1))
        assert early.items() <= labels_of(again).items()
        groups = again + finish(d, random.Random(5).sample(order[num_before:], 16 - num_before))
        assert labels_of(groups) == expected
        assert sizes_of(groups) == [4, 4, 4, 4]


def test_replacements_of_dropped_groups_move_none_that_was_sent():
    for seed in range(5):
        rng = random.Random(seed)
        d = new(dynamic_sampling=True, group_size=2)
        groups: list[TrainGroup] = []
        while waiting := d.running():
            response = rng.choice(waiting)
            zero_std = rng.random() < 0.4
            reward = 1.0 if zero_std or response.endswith("#0") else 0.0
            groups += groups_in(d.finish(response, reward))
        assert sizes_of(groups) == [4, 4, 4, 4]
        again = d.join("t", "trainer", incarnation=2) + d.publish(0)
        assert labels_of(groups_in(again)) == labels_of(groups)


@pytest.mark.parametrize(("order", "is_even"), [("random", True), ("arrival", False)])
def test_the_weight_of_a_token_by_mini_batch_is_that_of_one_large_batch(
    order: Literal["random", "arrival"], is_even: bool
):
    """As dapo has it, 1 / (updates x tokens of its update), against 1 / tokens of the step: over
    all tokens that the k-th updates of many steps have."""
    parts, num = 4, 32
    settings = replace(SETTINGS, prompts_per_step=num, mini_batches=parts, mini_batch_order=order)
    rng, shares = random.Random(2), [0.0] * parts
    for step in range(3000):
        lengths = [rng.lognormvariate(0, 0.8) for _ in range(num)]
        round = Round("plain", step, num, num, 0.0, RoundState.CLOSED)
        for k in range(num):
            prompt = DrawnPrompt(f"p{k}", 0, b"")
            group = Group(f"p{k}@0", prompt, round, k, 1, Sampling(1.0), 10)
            group.state = GroupState.ACCEPTED
            round.groups[group.id] = group
        round.accepted = sorted(round.groups.values(), key=lambda g: lengths[g.position])
        mini_batches.assign(settings, round)
        for g in round.in_turn:
            shares[g.mini_batch or 0] += lengths[g.position] / sum(lengths) / 3000
    weights = [1 / parts / share for share in shares]
    assert sum(shares) == pytest.approx(1)
    assert (max(abs(w - 1) for w in weights) < 0.02) == is_even
    assert is_even or weights[0] > 4 * weights[-1]


def test_the_shuffle_is_even():
    """Over many steps each position is as often in each mini-batch."""
    counts = [[0] * 4 for _ in range(PROMPTS)]
    for seed in range(200):
        d = new(run_seed=seed)
        groups = list(d.round.groups.values())
        settings = d.core.settings
        order = sorted(groups, key=lambda g: mini_batches._key(settings, g))  # pyright: ignore
        for place, group in enumerate(order):
            counts[group.position][place // 4] += 1
    assert all(25 <= n <= 78 for row in counts for n in row)  # 50 +- 4.5 standard deviations
