"""Real rank processes: the pipe, several ranks, checkpoints across numbers of ranks, failures."""

import asyncio
import math
import socket
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lightrl.system.child import ChildDied, Pipe
from lightrl.trainer.batch import micro_batches
from lightrl.trainer.checkpoint.on_disk import latest
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    Accumulate,
    Done,
    RankFailed,
    RankStarted,
    Save,
    Saved,
    StepFinished,
    Update,
)
from lightrl.trainer.rank.rank import main
from lightrl.weights.version.tensors import read_tensors
from lightrl.wire import pack_f32, pack_i32

DEADLINE_S = 110

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


async def started(ranks):
    async with asyncio.timeout(DEADLINE_S):
        events = [await rank.receive() for rank in ranks]
    assert all(isinstance(e, RankStarted) for e in events), events
    return events


async def step(ranks, samples, number):
    """One step on all ranks: (Published, metrics)."""
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    for rank, batches in zip(ranks, micro_batches(samples, len(ranks), 60), strict=True):
        rank.send(Accumulate(number, batches))
        rank.send(Update(number, len(samples), tokens, number + 1))
    published, metrics = None, {}
    async with asyncio.timeout(DEADLINE_S):
        for rank in ranks:
            accumulated = await rank.receive()
            assert isinstance(accumulated, Done), accumulated
            event = await rank.receive()
            assert isinstance(event, StepFinished)
            published, metrics = published or event.published, event.metrics
    return published, metrics


async def save(ranks, number, path, export=False):
    for rank in ranks:
        rank.send(Save(number, str(path), export))
    async with asyncio.timeout(DEADLINE_S):
        assert [await rank.receive() for rank in ranks] == [Done(number)] * len(ranks)
        assert await ranks[0].receive() == Saved(str(path))
        if export:
            assert await ranks[0].receive() == Saved(str(path), is_export=True)


def read(event):
    return dict(read_tensors(event.file))


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_train_like_one_and_take_over_its_checkpoint(
    start, new_rank, processes, samples, tmp_path
):
    """One rank for three steps = one, then two, then one, each from the checkpoint before it."""
    settings = {"algorithm": {"name": "dr_grpo", "kl_coef": 0.05}, "train": {"optim": {"lr": 1e-3}}}
    checkpoints = tmp_path / "run" / "checkpoints"

    async def on_two_ranks(first):
        async with processes(start(start_step=first, **settings), world=2) as ranks:
            begin, other = await started(ranks)
            assert other.published is None
            published, metrics = await step(ranks, samples, first)
            await save(ranks, first + 1, checkpoints / f"step_{first + 1}", export=True)
            return begin.published.file.digest, published.file.digest, metrics

    def on_one_rank(rank, number):
        totals = (len(samples), sum(len(s.token_ids) // 4 for s in samples))
        list(rank.perform(Accumulate(number, (tuple(samples),))))
        [finished] = rank.perform(Update(number, *totals, number + 1))
        return finished.published, finished.metrics

    alone = new_rank(**settings)
    first, _ = on_one_rank(alone, 0)
    alone.save(Save(1, str(checkpoints / "step_1")))
    _, metrics = on_one_rank(alone, 1)
    expected = read(on_one_rank(alone, 2)[0])

    async def on_three_ranks():
        async with processes(start(start_step=1, **settings), world=3) as ranks:
            return [event.published for event in await started(ranks)]

    published, *others = asyncio.run(on_three_ranks())
    assert published.file.digest == first.file.digest
    assert others == [None, None]
    restored, after, found_metrics = asyncio.run(on_two_ranks(1))
    assert restored == first.file.digest
    assert latest(checkpoints) == checkpoints / "step_2"
    for key in ("loss/policy", "loss/kl", "grad_norm", "entropy", "num_trained_tokens"):
        assert found_metrics[key] == pytest.approx(metrics[key], rel=1e-4), key

    rank = new_rank(start_step=2, **settings)
    assert rank.started.published.file.digest == after
    exported = load_file(checkpoints / "step_2" / "hf" / "model.safetensors")
    weights = read(rank.started.published)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    found = read(on_one_rank(rank, 2)[0])
    difference = math.sqrt(sum((found[n] - expected[n]).square().sum().item() for n in expected))
    assert difference <= 2e-6 * math.sqrt(sum(t.square().sum().item() for t in expected.values()))


def test_a_rank_trains_publishes_and_says_why_it_ends(start, processes, samples):
    async def run():
        async with processes(start(), world=1) as [rank]:
            [begin] = await started([rank])
            assert begin.device == "cpu"
            assert read(begin.published)
            published, metrics = await step([rank], samples, 0)
            assert published.file.policy_version == 1
            assert published.file.digest != begin.published.file.digest
            assert read(published).keys() == read(begin.published).keys()
            assert metrics["perf/micro_batches"] > 1
            rank.send(Accumulate(7, ()))
            async with asyncio.timeout(DEADLINE_S):
                assert await rank.receive() == RankFailed(
                    "Accumulate of step 7, but the rank is at step 1", is_final=True
                )
                with pytest.raises(ChildDied, match="exit status 1"):
                    await rank.receive()

    asyncio.run(run())


def test_a_response_that_the_model_cannot_have_made_is_named(start, samples):
    wrong = replace(samples[1], token_ids=pack_i32([24]), rollout_logprobs=pack_f32([-1.0]))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        daemon = Pipe(ours, RANK_EVENTS, RANK_COMMANDS)
        daemon.send(start())
        daemon.send(Accumulate(0, ((samples[0], wrong),)))
        with pytest.raises(SystemExit):
            main(theirs)
        _, event = daemon.receive(DEADLINE_S)
        assert event == RankFailed(
            "p0@0#1: token id 24 is outside the vocabulary of 24", is_final=True
        )


def test_a_model_that_cannot_be_loaded_is_one_line(start, tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        daemon = Pipe(ours, RANK_EVENTS, RANK_COMMANDS)
        daemon.send(start(tmp_path / "nowhere"))
        with pytest.raises(SystemExit):
            main(theirs)
        assert daemon.receive(DEADLINE_S) == [
            RankFailed(
                f"model.path = '{tmp_path}/nowhere': no such directory, and not a hub id "
                "(org/name)",
                True,
            )
        ]
