"""A training rank that sends versions from their files, for tests; forked where torch is there."""

import os
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from lightrl.errors import WeightsError
from lightrl.system.addresses import join_address
from lightrl.weights.broadcast.group import form, listen
from lightrl.weights.broadcast.membership import Membership
from lightrl.weights.broadcast.transfer import send
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import map_tensors

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Order:
    """What to send, and what happens before, when the group is there."""

    file: VersionFile
    # it reports "waits", until it is told to go on
    waits: bool = False
    # that it sends itself
    signal: int = 0
    # the last byte is another one
    is_wrong: bool = False


def main(membership: Membership, pipe: Connection) -> None:
    """Reports its address; after each order "sent" or why not."""
    torch.set_num_threads(1)
    place = membership.group
    store = listen(HOST, place.world, membership.timeout_s)
    address = join_address(HOST, store.port)
    pipe.send(address)
    group = None
    try:
        while True:
            order: Order = pipe.recv()
            if group is None:
                own = replace(membership, group=replace(place, address=address))
                group = form(own, "cpu", store)
            if order.signal:
                os.kill(os.getpid(), order.signal)
            if order.waits:
                pipe.send("waits")
                pipe.recv()
            whole = TensorSpec("", "uint8", (order.file.num_bytes,), 0)
            [(_, data)] = map_tensors(order.file, [whole])
            if order.is_wrong:
                data = data.clone()
                data[-1] ^= 1
            send(group, data)
            pipe.send("sent")
    except WeightsError as e:
        pipe.send(str(e))
        pipe.recv()
    except (EOFError, BrokenPipeError):
        pass
