"""Broadcasts over NCCL. Never run so far: no machine with two GPUs.

Nor has it been seen between two machines that NCCL takes the interface by which members reach each
other: it looks for one once in a process, see `trainer/process_group.py` and
`weights/broadcast/group.py`. With NCCL_DEBUG=INFO the line "Bootstrap: Using" says which it took.
"""

import multiprocessing
import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightrl.errors import WeightsError
from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.system.addresses import join_address
from lightrl.weights.broadcast.group import form, listen
from lightrl.weights.broadcast.membership import Membership
from lightrl.weights.broadcast.transfer import receive, send
from tests.gpu.conftest import cuda_count
from tests.weights.broadcast_members import version

HOST = "127.0.0.1"
TENSORS = (
    ("scalar", "float32", ()),
    ("norm", "bfloat16", (129,)),
    *((f"layers.{i}", "bfloat16", (513, 1024)) for i in range(20)),
)


def be_member(device: str, membership: Membership, pipe: Any) -> None:
    rank, store = membership.group.rank, None
    where = f"{device}:{rank}" if device == "cuda" else device
    if rank == 0:
        store = listen(HOST, 2, membership.timeout_s)
        address = join_address(HOST, store.port)
        membership = replace(membership, group=replace(membership.group, address=address))
        pipe.send(address)
    manifest, data = version(TENSORS, 1)
    try:
        group = form(membership, where, store)
        for _ in range(2):
            if rank == 0:
                send(group, data)
            else:
                got = {name: tensor.cpu() for name, tensor in receive(group, manifest)}
                pipe.send(all(_same(got[t.name], data, t) for t in manifest.tensors))
        pipe.recv()
        if rank == 1:
            return  # without a word
        send(group, data)
        pipe.recv()
    except WeightsError as e:
        pipe.send(str(e))


def _same(tensor: torch.Tensor, data: torch.Tensor, spec: Any) -> bool:
    flat = data[spec.offset : spec.offset + spec.num_bytes]
    return torch.equal(tensor.reshape(-1).view(torch.uint8), flat)


def test_a_rank_and_an_engine_on_two_gpus_and_the_end_of_one(device):
    if device == "cuda" and cuda_count() < 2:
        pytest.skip("one GPU: NCCL refuses two ranks on it")
    context = multiprocessing.get_context("spawn")
    backend = "nccl" if device == "cuda" else "gloo"
    place = BroadcastGroup(secrets.token_hex(16), "", 0, 2, backend)
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            member = Membership(replace(place, rank=rank), 10.0)
            process = context.Process(target=be_member, args=(device, member, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            if rank == 0:
                assert ours.poll(60)
                place = replace(place, address=ours.recv())
        for _ in range(2):
            assert pipes[1].poll(60)
            assert pipes[1].recv() is True
        for pipe in pipes:
            pipe.send("go on")
        assert pipes[0].poll(40)
        assert pipes[0].recv().startswith("broadcast: ")
    finally:
        for process in processes:
            process.kill()
            process.join()
