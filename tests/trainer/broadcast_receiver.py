"""An engine's side of broadcasts as a process of its own, for tests of trainers."""

import hashlib
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightrl.errors import WeightsError
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.proof import Proof, proof_seed
from lightrl.weights.broadcast.rendezvous import Membership
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.manifest import VersionFile, read_manifest


def main(meet: tuple[str, int], place: Membership, pipe: Connection) -> None:
    """Reports "formed"; then for each VersionFile the sums and a digest of all that came, and at
    last why it is over."""
    torch.set_num_threads(1)
    try:
        group = form(meet, place, "cpu")
        pipe.send("formed")
        while True:
            file: VersionFile = pipe.recv()
            tensors = read_manifest(file).tensors
            proof = Proof(proof_seed(place.name, file.policy_version))
            flat = torch.zeros(file.num_bytes, dtype=torch.uint8)
            for spec, (_, tensor) in zip(tensors, receive(group, tensors, proof), strict=True):
                data = tensor.reshape(-1).view(torch.uint8)
                flat[spec.offset : spec.offset + len(data)] = data
            pipe.send((proof.sums(), hashlib.sha256(flat.numpy()).hexdigest()))
    except WeightsError as e:
        pipe.send(str(e))
    except EOFError:
        pass


@contextmanager
def receiver(meet: tuple[str, int], place: Membership) -> Iterator[tuple[Any, Connection]]:
    """The process and what it says."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(meet, place, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.kill()
        process.join()
