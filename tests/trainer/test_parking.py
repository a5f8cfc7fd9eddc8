"""Ranks that give their devices back: the same bits wherever they park, nothing left in memory, the
same checkpoints."""

import asyncio

import pytest
import torch

from lightrl.trainer.learner import offload
from lightrl.trainer.learner.host_memory import HostMemory
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    RankStarted,
    ResetStep,
    Save,
    Saved,
    StepFinished,
    Suspend,
    Update,
)
from lightrl.weights.version.tensors import read_tensors
from tests.support.tiers import NEEDS_TORCHAO, e2e
from tests.trainer.conftest import DEADLINE_S
from tests.trainer.test_sharding import assert_close

SHARED = {"rollout": {"placement": "shared"}}
MOVED = 1e-3

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def totals(samples):
    return len(samples), sum(len(s.token_ids) // 4 for s in samples)


def commands(samples, step, mini_batches=1):
    """Of one step, in thirds that arrive one after the other; the last third is a mini-batch of its
    own if there are two."""
    thirds = [tuple(samples[i : i + 8]) for i in range(0, 24, 8)]
    if mini_batches == 1:
        yield from (Accumulate(step, (third,)) for third in thirds)
        yield Update(step, *totals(samples), step + 1)
        return
    yield Accumulate(step, (thirds[0],))
    yield Accumulate(step, (thirds[1][:4], thirds[1][4:]))
    yield Update(step, *totals(samples[:16]))
    yield Accumulate(step, (thirds[2],))
    yield Update(step, *totals(samples[16:]), step + 1)


OF_THE_MACHINE = ("timing", "weights/", "perf/host_memory_gib")


def run(rank, samples, parks=(), steps=2, mini_batches=1):
    """Digests of all versions, and the last figures; Suspend after so many commands of a step."""
    digests, metrics = [], {}
    for step in range(rank.step, rank.step + steps):
        for i, command in enumerate(commands(samples, step, mini_batches)):
            if i in parks:
                [parked] = rank.perform(Suspend(step))
                assert parked.suspended.num_bytes
                assert_away(rank)
            for event in rank.perform(command):
                if isinstance(event, StepFinished):
                    assert (event.suspended is None) == (rank.learner.parking is None)
                    if event.suspended:
                        assert_away(rank)
                    digests.append(event.published.file.digest)
                    metrics = event.metrics
    return digests, {k: v for k, v in metrics.items() if not k.startswith(OF_THE_MACHINE)}


def on_device(rank):
    """Bytes of what is there by itself, of tensors with a dimension."""
    learner = rank.learner
    modules = [learner.policy.module, *([learner.reference.module] if learner.reference else [])]
    tensors = [p for module in modules for p in module.parameters()]
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += [t for s in learner.optimizer.state.values() for t in s.values() if t.ndim]
    tensors += learner._start.weights
    return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())


def assert_away(rank):
    assert on_device(rank) == 0


PLACES = [(), (0,), (1,), (2,), (3,), (0, 1, 2, 3), (2, 2)]
WAYS = {
    "plain": {},
    "reference": {"algorithm": {"name": "grpo", "kl_coef": 0.1}},
    "whitened": {"algorithm": {"name": "reinforce++"}},
    "lora": {"model": {"path": "unused", "lora": {"rank": 4}}},
    "eight bits": {"train": {"optim": {"name": "adamw8bit", "lr": 1e-3}}},
    "hosted": {"train": {"offload": "optimizer", "optim": {"lr": 1e-3}}},
    "all": {"train": {"offload": "all", "optim": {"lr": 1e-3}}},
}
EIGHT_BITS = pytest.param("eight bits", marks=[pytest.mark.e2e, NEEDS_TORCHAO])


@pytest.mark.parametrize(
    "way", ["plain", "all", EIGHT_BITS, *e2e(["reference", "whitened", "lora", "hosted"])]
)
def test_a_step_has_the_same_bits_wherever_it_is_parked(new_rank, samples, way, monkeypatch):
    monkeypatch.setattr(offload, "PART_VALUES", 5000)  # several parts
    expected = run(new_rank(**WAYS[way]), samples)
    places = PLACES if way == "plain" else [(), (0, 1, 2, 3)]
    for parks in places:
        rank = new_rank(**WAYS[way], **SHARED)
        assert rank.started.suspended.num_bytes > 0
        assert_away(rank)
        assert run(rank, samples, parks) == expected, parks


@pytest.mark.parametrize("old", ["trainer", *e2e(["rollout"])])
def test_mini_batches_have_the_same_bits_wherever_they_are_parked(new_rank, samples, old):
    sections = {
        "train": {"mini_batches": 2, "optim": {"lr": 1e-3}},
        "algorithm": {"name": "grpo", "old_logprobs": old},
    }
    expected = run(new_rank(**sections), samples, mini_batches=2)
    for parks in [(), (1,), (2,), (3,), (4,), (0, 1, 2, 3, 4)]:
        found = run(new_rank(**sections, **SHARED), samples, parks, mini_batches=2)
        assert found == expected, parks


def test_while_gradients_are_added_up_the_state_of_the_optimizer_is_away(new_rank, samples):
    rank = new_rank(train={"mini_batches": 2, "optim": {"lr": 1e-3}}, **SHARED)
    run(rank, samples, mini_batches=2, steps=1)
    some = list(commands(samples, 1, mini_batches=2))

    def state():
        values = [t for s in rank.learner.optimizer.state.values() for t in s.values() if t.ndim]
        assert values
        return sum(t.untyped_storage().size() for t in values)

    assert state() == 0
    list(rank.perform(some[0]))
    assert state() == 0
    assert on_device(rank) > 0
    list(rank.perform(some[1]))
    list(rank.perform(some[2]))  # the update
    assert state() == 0


@pytest.mark.parametrize("parks", [(3,), pytest.param((1,), marks=pytest.mark.e2e)])
@pytest.mark.parametrize("stays", [True, *e2e([False])], ids=["saved", "trained"])
def test_a_step_that_begins_anew_while_parked_is_as_if_it_had_not_begun(
    new_rank, samples, tmp_path, parks, stays
):
    """Its updates are taken back without the device, and are in no checkpoint."""
    sections = {"train": {"mini_batches": 2, "optim": {"lr": 1e-3}}}
    expected, _ = run(new_rank(**sections), samples, mini_batches=2)
    rank = new_rank(**sections, **SHARED)
    run(rank, samples, steps=1, mini_batches=2)
    for command in list(commands(samples, 1, 2))[: parks[0]]:
        list(rank.perform(command))
    list(rank.perform(Suspend(1)))
    assert list(rank.perform(ResetStep(1))) == [Done(1)]
    assert_away(rank)
    if stays:
        path = str(tmp_path / "run" / "checkpoints" / "step_1")
        assert rank.save(Save(1, path))[-1] == Saved(path)
        assert_away(rank)
        rank = new_rank(start_step=1, **sections)
        assert rank.started.published.file.digest == expected[0]
    assert run(rank, samples, steps=1, mini_batches=2)[0] == expected[1:]


@pytest.mark.parametrize("way", ["hosted", EIGHT_BITS, *e2e(["plain", "lora"])])
def test_a_checkpoint_of_a_parked_rank_has_the_same_bits(new_rank, samples, tmp_path, way):
    path = tmp_path / "run" / "checkpoints" / "step_1"
    rank = new_rank(**WAYS[way], **SHARED)
    first, _ = run(rank, samples, steps=1)
    assert rank.save(Save(1, str(path))) == [Done(1), Saved(str(path))]
    assert_away(rank)
    on, _ = run(rank, samples, steps=1)
    for sections in (WAYS[way], WAYS[way] | SHARED):
        again = new_rank(start_step=1, **sections)
        assert again.started.published.file.digest == first[0]
        assert run(again, samples, steps=1)[0] == on


def test_memory_of_the_host_is_allocated_once():
    host = HostMemory(torch.device("cpu"))
    kept = torch.arange(3000.0)
    for step in range(4):
        fresh = torch.full((5000,), float(step))  # as gradients are
        views = [kept, kept[100:200], fresh]
        host.put_away(views)
        assert host.bytes_of(views) == 32_000
        assert host.view(kept)[7] == 7
        host.view(fresh)[0] = 9
        host.put_away(views)  # is there
        host.fetch(views)
        assert torch.equal(kept, torch.arange(3000.0))
        assert (fresh[0], fresh[1]) == (9, step)
        assert host.bytes_of(views) == 0
    assert {size: len(free) for size, free in host._free.items()} == {12_000: 1, 20_000: 1}
    host.put_away([kept])
    host.drop([kept])
    assert len(host._free[12_000]) == 1


async def answers(ranks, kind):
    found = []
    for rank in ranks:
        while not isinstance(event := await rank.receive(), kind):
            pass
        found.append(event)
    return found


async def suspended(ranks):
    """Wait for the answer of each rank to Suspend."""
    found = []
    for rank in ranks:
        while not (isinstance(event := await rank.receive(), Done) and event.suspended):
            pass
        found.append(event.suspended)
    return found


SHARDED = {
    "late": {},
    "each": {"sync": "each"},
    "host-optimizer": {"offload": "optimizer"},
    "copies": {"replicas": 2},
}


async def two_steps(ranks, samples, path, parks):
    """Two steps of two ranks, the second of which begins anew once."""
    halves = samples[::2], samples[1::2]
    for step in range(2):
        for begins in (True, False) if step else (False,):
            for part in (slice(0, 6), slice(6, 12)):
                for rank, half in zip(ranks, halves, strict=True):
                    rank.send(Accumulate(step, (tuple(half[part]),)))
                    if parks:
                        rank.send(Suspend(step))
                if parks:
                    assert all(p.num_bytes for p in await suspended(ranks))
            if begins:
                for rank in ranks:
                    rank.send(ResetStep(step))
                await answers(ranks, Done)
        for rank in ranks:
            rank.send(Update(step, *totals(samples), step + 1))
        finished = await answers(ranks, StepFinished)
        published = finished[0].published
    for rank in ranks:
        rank.send(Save(2, path))
    await answers(ranks[:1], Saved)
    norm = finished[0].metrics["grad_norm"]
    return published.file.digest, norm, dict(read_tensors(published.file))


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("way", SHARDED)
def test_two_ranks_that_park_learn_what_two_others_do(
    start, new_rank, processes, samples, tmp_path, way
):
    path = str(tmp_path / "run" / "checkpoints" / "step_2")
    sections = {"train": {"ranks": 2, "optim": {"lr": MOVED}} | SHARDED[way]}

    async def on_two(parks):
        shared = SHARED if parks else {}
        async with (
            asyncio.timeout(DEADLINE_S),
            processes(start(**sections, **shared), world=2) as ranks,
        ):
            events = [await rank.receive() for rank in ranks]
            assert all(isinstance(e, RankStarted) and bool(e.suspended) == parks for e in events)
            return await two_steps(ranks, samples, path, parks)

    expected = asyncio.run(on_two(False))
    found = asyncio.run(on_two(True))
    assert found[:2] == expected[:2]
    alone = new_rank(start_step=2, **replace_ranks(sections))
    assert alone.started.published.file.digest == expected[0]


async def steps_of_copies(ranks, samples, parks):
    """Two steps; in each the first replica begins alone, while the other is parked still."""
    half = len(ranks) // 2
    copies = [ranks[:half], ranks[half:]]

    async def compute(copy, step, some):
        for rank, mine in zip(copy, (some[k::half] for k in range(half)), strict=True):
            rank.send(Accumulate(step, (tuple(mine),)))
        await answers(copy, Done)

    async def park(step):
        for rank in ranks if parks else ():
            rank.send(Suspend(step))
        await suspended(ranks if parks else ())

    for step in range(2):
        for begins_anew in (True, False):
            await compute(copies[step], step, samples[:8])
            if begins_anew:
                for rank in ranks:
                    rank.send(ResetStep(step))
                await answers(ranks, Done)
            await park(step)
        await compute(copies[1 - step], step, samples[8:14])
        await park(step)
        await compute(copies[step], step, samples[14:])
        for rank in ranks:
            rank.send(Update(step, *totals(samples), step + 1))
        published = (await answers(ranks, StepFinished))[0].published
    return published.file.digest, {n: t.clone() for n, t in read_tensors(published.file)}


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("num", "sync"), [(2, "auto"), (4, "each")])
def test_replicas_that_park_learn_what_others_do(start, new_rank, processes, samples, num, sync):
    train = {"ranks": num, "replicas": 2, "sync": sync, "optim": {"lr": MOVED}}

    async def found(parks):
        told = start(train=train, **(SHARED if parks else {}))
        async with asyncio.timeout(DEADLINE_S), processes(told, world=num) as ranks:
            return await steps_of_copies(ranks, samples, parks)

    digest, weights = asyncio.run(found(parks=True))
    assert digest == asyncio.run(found(parks=False))[0]
    alone = new_rank(train={"optim": {"lr": MOVED}})
    run(alone, samples)
    assert_close(weights, dict(read_tensors(alone.file)))


def replace_ranks(sections):
    return {"train": sections["train"] | {"ranks": 1, "replicas": 1}}
