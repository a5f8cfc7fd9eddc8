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
from lightrl.weights.broadcast.membership import Membership
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.manifest import VersionFile, read_manifest


def main(place: Membership, pipe: Connection) -> None:
    """Reports "formed"; then for each VersionFile a digest of all that came, and at last why it is
    over."""
    torch.set_num_threads(1)
    try:
        group = form(place, "cpu")
        pipe.send("formed")
        while True:
            file: VersionFile = pipe.recv()
            manifest = read_manifest(file)
            flat = torch.zeros(file.num_bytes, dtype=torch.uint8)
            for spec, (_, tensor) in zip(manifest.tensors, receive(group, manifest), strict=True):
                data = tensor.reshape(-1).view(torch.uint8)
                flat[spec.offset : spec.offset + len(data)] = data
            pipe.send(hashlib.sha256(flat.numpy()).hexdigest())
    except WeightsError as e:
        pipe.send(str(e))
    except EOFError:
        pass


@contextmanager
def receiver(place: Membership) -> Iterator[tuple[Any, Connection]]:
    """The process, and the pipe from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(place, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.kill()
        process.join()
