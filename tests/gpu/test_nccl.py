"""Groups of ranks on GPUs: NCCL for what is on them, gloo beside it for what is not."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_lib.shapes import SHAPES, make_model

from lightrl.system.child import Child
from lightrl.trainer.batch import micro_batches
from lightrl.trainer.process_group import join
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    RANK_TARGET,
    Accumulate,
    Done,
    RankStarted,
    Save,
    Saved,
    StartRank,
    StepFinished,
    Update,
)
from tests.gpu.conftest import cuda_count
from tests.gpu.test_trainer import config_of, samples_of

DEADLINE_S = 110
STEPS = 3


def free_address() -> str:
    """A file by which ranks meet."""
    return str(Path(tempfile.mkdtemp()) / "rendezvous")


def test_a_group_of_one_adds_up_on_the_device_and_beside_it(device):
    """As `Rank` joins: tensors on the GPU go through NCCL, those on the CPU through gloo."""
    on = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    start = StartRank(
        "", "", rank=0, world=1, rendezvous=free_address(), publish_dir="", run_dir=""
    )
    join(start, on)
    try:
        for where in {on, torch.device("cpu")}:
            value = torch.arange(1000.0, device=where)
            dist.all_reduce(value)
            assert value.cpu().equal(torch.arange(1000.0))
            dist.broadcast(value, 0)
        if device == "cuda":
            assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
            shard = torch.zeros(500, device=on)
            dist.reduce_scatter_tensor(shard, torch.arange(500.0, device=on))
            assert shard.cpu().equal(torch.arange(500.0))
    finally:
        dist.destroy_process_group()


@contextlib.asynccontextmanager
async def started(tmp_path, model, world, first=0):
    """`world` ranks as processes, each on a GPU of its own, and what they said of their start."""
    rendezvous, ranks = free_address(), []
    publish, run_dir = str(tmp_path / f"weights-{world}"), str(tmp_path / "run")
    try:
        async with asyncio.timeout(DEADLINE_S):
            for rank in range(world):
                log = tmp_path / f"rank-{world}-{rank}.log"
                child = await Child.start(
                    RANK_TARGET, f"rank-{rank}", RANK_COMMANDS, RANK_EVENTS, env={}, log=log
                )
                ranks.append(child)
                start = (config_of(model), str(model), rank, world)
                child.send(StartRank(*start, rendezvous, publish, run_dir, first))
            yield ranks, [await expect(rank, RankStarted) for rank in ranks]
    finally:
        for child in ranks:
            await child.stop()


def require_two_gpus(device):
    if device == "cuda" and cuda_count() < 2:
        pytest.skip("one GPU: NCCL refuses two ranks on it")


def test_two_ranks_on_two_gpus_train_and_save(device, tmp_path):
    """FSDP over NCCL: a step, a checkpoint, and one rank alone that takes it up with the same
    weights."""
    require_two_gpus(device)
    model = make_model(tmp_path / "model", "small", "cpu")
    samples = samples_of(SHAPES["small"]["vocab_size"], 16, 40)
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    checkpoint.parent.mkdir(parents=True)

    async def on_two() -> str:
        async with started(tmp_path, model, 2) as (ranks, _):
            for rank, batches in zip(ranks, micro_batches(samples, 2, 400), strict=True):
                rank.send(Accumulate(0, batches))
                rank.send(Update(0, len(samples), tokens, 1))
                rank.send(Save(1, str(checkpoint)))
            digest = ""
            for i, rank in enumerate(ranks):
                await expect(rank, Done)
                finished = await expect(rank, StepFinished)
                if i == 0:
                    digest = finished.published.file.digest
                assert finished.metrics["grad_norm"] > 0
                await expect(rank, Done)
                if i == 0:
                    await expect(rank, Saved)
            return digest

    async def on_one() -> str:
        async with started(tmp_path, model, 1, first=1) as (_, said):
            return said[0].published.file.digest

    assert asyncio.run(on_two()) == asyncio.run(on_one())


def test_two_ranks_have_the_losses_of_one(device, tmp_path, figure):
    """Over some steps; what of them differs is rounding, in bfloat16 on GPUs."""
    require_two_gpus(device)
    model = make_model(tmp_path / "model", "small", "cpu")
    samples = samples_of(SHAPES["small"]["vocab_size"], 16, 40)
    tokens = sum(len(s.token_ids) // 4 for s in samples)

    async def run(world):
        async with started(tmp_path, model, world) as (ranks, _):
            metrics = []
            for step in range(STEPS):
                for rank, batches in zip(ranks, micro_batches(samples, world, 400), strict=True):
                    rank.send(Accumulate(step, batches))
                    rank.send(Update(step, len(samples), tokens, step + 1))
                for i, rank in enumerate(ranks):
                    await expect(rank, Done)
                    finished = await expect(rank, StepFinished)
                    metrics += [finished.metrics] if i == 0 else []
            return metrics

    one, two = asyncio.run(run(1)), asyncio.run(run(2))
    for key in ("loss/policy", "grad_norm", "entropy", "train_rollout_logprob_abs_diff"):
        apart = max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(one, two, strict=True))
        figure(f"two ranks against one, {STEPS} steps: {key}, apart by", apart)
        assert apart <= (0.02 if device == "cuda" else 1e-4), key


async def expect(rank, kind):
    event = await rank.receive()
    assert isinstance(event, kind), event
    return event
