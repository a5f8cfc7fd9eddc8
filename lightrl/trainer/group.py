"""How the ranks of a trainer become one group: where they find each other, and what their sockets
listen on.

Nothing else of torch.distributed is decided here.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from lightrl.system.interfaces import interface_of
from lightrl.trainer.protocol import StartRank

# ranks may wait for each other so long, e.g. while one loads its model
COLLECTIVE_TIMEOUT_S = 600.0


def join(start: StartRank, device: torch.device) -> None:
    """All ranks are processes of this machine, and nobody else may speak to them: what torch opens
    authenticates nobody, and its collectives of objects, which checkpoints are planned with,
    unpickle.

    So they find each other through a file in a directory of their user's, where TCPStore would
    listen on every interface, and gloo listens on loopback, where it would choose the address of
    this host's name.

    NCCL's ranks meet over sockets, too, at which nobody is heard who does not know the random
    number of the communicator, and nothing is unpickled. NCCL looks once for the interface of all
    of a process's communicators, at the first of them: where a later one may be that of a
    broadcast, with engines on other machines, it cannot be loopback.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    if not start.nccl_host:
        os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
    elif interface := interface_of(start.nccl_host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(start.rendezvous, start.world),  # pyright: ignore[reportPrivateImportUsage]
        rank=start.rank,
        world_size=start.world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def _loopback() -> str:
    """The name of the loopback interface: "lo" on Linux, "lo0" on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
