"""Broadcasts over NCCL, and their proof on a device. Never run so far: no machine with two GPUs.

Nor has it been seen between two machines that NCCL takes the interface by which members reach each
other: it looks for one once in a process, see `trainer/group.py` and
`weights/broadcast/group.py`. With NCCL_DEBUG=INFO the line "Bootstrap: Using" says which it took.
"""

import multiprocessing
import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightrl.errors import WeightsError
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.proof import BLOCK_BYTES, Proof
from lightrl.weights.broadcast.rendezvous import Membership, Rendezvous
from lightrl.weights.broadcast.transfer import receive, send
from lightrl.weights.version.layout import plan
from tests.gpu.conftest import cuda_count

SEED = bytes(range(32))
TENSORS = plan(
    [("scalar", "float32", ()), ("norm", "bfloat16", (129,))]
    + [(f"layers.{i}", "bfloat16", (513, 1024)) for i in range(20)]
)


def content(index: int) -> torch.Tensor:
    spec = TENSORS[index]
    generator = torch.Generator().manual_seed(index)
    data = torch.randint(0, 256, (spec.num_bytes,), generator=generator, dtype=torch.uint8)
    return data.view(getattr(torch, spec.dtype)).view(spec.shape)


def test_sums_on_the_device_are_those_of_the_cpu(device):
    data = torch.randint(0, 256, (600 * BLOCK_BYTES + 1234,), dtype=torch.uint8)
    for offset in (0, 2, BLOCK_BYTES - 6):
        here, there = Proof(SEED), Proof(SEED, device)
        here.add(data, offset)
        there.add(data.to(device), offset)
        assert here.sums() == there.sums()


def be_member(rank: int, device: str, place: Membership, at: Any, pipe: Any) -> None:
    where = f"{device}:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank)
    if rank == 0:
        at = Rendezvous("127.0.0.1")
        pipe.send(at.address)
    try:
        group = form(at, replace(place, rank=rank), where)
        for _ in range(2):
            if rank == 0:
                send(group, TENSORS, lambda i: content(i).to(where))
            else:
                got = [tensor.cpu() for _, tensor in receive(group, TENSORS, Proof(SEED, where))]
                pipe.send(all(_same(t, content(i)) for i, t in enumerate(got)))
        pipe.recv()
        if rank == 1:
            return  # without a word
        send(group, TENSORS, lambda i: content(i).to(where))
    except WeightsError as e:
        pipe.send(str(e))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_a_rank_and_an_engine_on_two_gpus_and_the_end_of_one(device):
    if device == "cuda" and cuda_count() < 2:
        pytest.skip("one GPU: NCCL refuses two ranks on it")
    context = multiprocessing.get_context("spawn")
    backend = "nccl" if device == "cuda" else "gloo"
    place = Membership(secrets.token_hex(16), 0, 1, 2, backend, 30.0)
    at, pipes, processes = None, [], []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=be_member, args=(rank, device, place, at, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            if rank == 0:
                assert ours.poll(60)
                at = ours.recv()
        for _ in range(2):
            assert pipes[1].poll(60)
            assert pipes[1].recv() is True
        for pipe in pipes:
            pipe.send("go on")
        assert pipes[0].poll(40)
        assert pipes[0].recv() == "broadcast: member 1 is gone"
    finally:
        for process in processes:
            process.kill()
            process.join()
