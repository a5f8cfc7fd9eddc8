"""A training rank that sends versions from their files, for tests; forked where torch is there."""

import os
import signal
from functools import partial
from multiprocessing.connection import Connection

import torch

from lightrl.errors import WeightsError
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.proof import Proof
from lightrl.weights.broadcast.rendezvous import Membership, Rendezvous
from lightrl.weights.broadcast.transfer import send
from lightrl.weights.version.manifest import read_manifest
from lightrl.weights.version.tensors import read_tensors


def main(place: Membership, pipe: Connection) -> None:
    torch.set_num_threads(1)
    meet = Rendezvous("127.0.0.1")
    pipe.send(meet.address)
    try:
        group = form(meet, place, "cpu")
        while True:
            file, seed, dies_at = pipe.recv()
            whole = [tensor for _, tensor in read_tensors(file)]
            tensors = read_manifest(file).tensors
            proof = Proof(seed)
            for spec, tensor in zip(tensors, whole, strict=True):
                proof.add(tensor, spec.offset)
            pipe.send(proof.sums())
            send(group, tensors, partial(_rows, whole, dies_at))
    except (WeightsError, EOFError):
        pass


def _rows(whole: list[torch.Tensor], dies_at: int | None, index: int) -> torch.Tensor:
    if index == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole[index]
