"""Real rank processes: the pipe, several ranks, checkpoints across numbers of ranks, failures."""

import asyncio
from pathlib import Path

import pytest
import torch

from lightrl.child import ChildDied
from lightrl.trainer.batch import micro_batches
from lightrl.trainer.checkpoint import latest
from lightrl.trainer.protocol import (
    Accumulate,
    Accumulated,
    FinishStep,
    Published,
    RankFailed,
    RankStarted,
    Save,
    Saved,
    StepFinished,
)
from lightrl.weights.tensors import read_tensors

DEADLINE_S = 60


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
        rank.send(FinishStep(number, len(samples), tokens, number + 1))
    published, metrics = None, {}
    async with asyncio.timeout(DEADLINE_S):
        for rank in ranks:
            accumulated = await rank.receive()
            assert isinstance(accumulated, Accumulated), accumulated
            event = await rank.receive()
            if isinstance(event, Published):
                published, event = event, await rank.receive()
            assert isinstance(event, StepFinished)
            metrics = event.metrics
    return published, metrics


async def save(ranks, number, path, export=False):
    for rank in ranks:
        rank.send(Save(number, str(path), export))
    async with asyncio.timeout(DEADLINE_S):
        assert [await rank.receive() for rank in ranks] == [Saved(str(path))] * len(ranks)


def read(event):
    return dict(read_tensors(Path(event.path), event.manifest))


def assert_close(a, b):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=2e-6)


def test_two_ranks_train_like_one_and_resume_each_others_checkpoints(start, processes, samples, tmp_path):
    """1 rank for three steps = 2 ranks for one, then 1, then 2, each from the checkpoint of the one before."""
    checkpoints = tmp_path / "run" / "checkpoints"
    settings = {"algorithm": {"name": "dr_grpo", "kl_coef": 0.05}}

    async def leg(world, first, last):
        seen = []
        async with processes(start(start_step=first, **settings), world) as ranks:
            begin, *_ = await started(ranks)
            assert begin.manifest.policy_version == first
            for number in range(first, last):
                seen.append(await step(ranks, samples, number))
            if (path := checkpoints / f"step_{last}").parent.exists() or world > 1:
                await save(ranks, last, path)
            return begin.manifest.digest, read(seen[-1][0]), seen[-1]

    async def legs():
        _, expected, (_, metrics) = await leg(1, 0, 3)
        digest, _, (published, _) = await leg(2, 0, 1)
        assert digest == published.manifest.digest or published.manifest.digest
        restored, _, (second, _) = await leg(1, 1, 2)
        assert restored == published.manifest.digest
        restored, found, (_, found_metrics) = await leg(2, 2, 3)
        assert restored == second.manifest.digest
        assert_close(found, expected)
        for key in ("loss/policy", "loss/kl", "grad_norm", "entropy", "num_trained_tokens"):
            assert found_metrics[key] == pytest.approx(metrics[key], rel=1e-4), key
        assert latest(checkpoints) == checkpoints / "step_3"

    asyncio.run(legs())


def test_a_model_that_cannot_be_loaded_is_one_line_and_the_end(start, processes, tmp_path):
    async def run():
        async with processes(start(tmp_path / "nowhere"), 1) as [rank]:
            async with asyncio.timeout(DEADLINE_S):
                event = await rank.receive()
                assert isinstance(event, RankFailed)
                assert event.reason == f"{tmp_path}/nowhere: not a model directory: it has no config.json"
                with pytest.raises(ChildDied, match="exit status 1"):
                    await rank.receive()

    asyncio.run(run())
