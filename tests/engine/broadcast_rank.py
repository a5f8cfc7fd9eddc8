"""A training rank that sends versions from their files, for tests; forked where torch is there."""

import os
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from lightrl.errors import WeightsError
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.proof import Proof, proof_seed
from lightrl.weights.broadcast.rendezvous import Membership, Rendezvous
from lightrl.weights.broadcast.transfer import send
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.tensors import read_tensors


@dataclass(frozen=True)
class Order:
    """What to send; before which tensor something happens."""

    file: VersionFile
    at: int | None = None
    # 0: it waits for a word
    signal: int = 0


def main(place: Membership, pipe: Connection) -> None:
    """Says its address; after each order the sums of what it sends, and at the end "sent" or why
    not."""
    torch.set_num_threads(1)
    meet = Rendezvous("127.0.0.1")
    pipe.send(meet.address)
    try:
        group = form(meet, place, "cpu")
        while True:
            order = pipe.recv()
            file = order.file
            whole = [tensor for _, tensor in read_tensors(file)]
            tensors = read_manifest(file).tensors
            proof = Proof(proof_seed(place.name, file.policy_version))
            for spec, tensor in zip(tensors, whole, strict=True):
                proof.add(tensor, spec.offset)
            pipe.send(proof.sums())
            send(group, tensors, partial(_rows, whole, order, pipe))
            pipe.send("sent")
    except WeightsError as e:
        pipe.send(str(e))
        pipe.recv()
    except (EOFError, BrokenPipeError):
        pass


def _rows(whole: list[torch.Tensor], order: Order, pipe: Connection, index: int) -> torch.Tensor:
    if index == order.at:
        if order.signal:
            os.kill(os.getpid(), order.signal)
        else:
            pipe.send("waits")
            pipe.recv()
    return whole[index]
