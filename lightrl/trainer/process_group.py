"""The process group of a trainer's ranks: where they meet, and what their sockets listen on."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from lightrl.system.addresses import interface_of
from lightrl.trainer.protocol import StartRank

# Ranks wait for each other while one downloads its model, loads it, or writes to a slow disk, none
# of which ends a run. The daemon detects a rank that is dead or hangs, ends all ranks, and reports
# a slow start (rank_processes.py).
COLLECTIVE_TIMEOUT_S = 24 * 3600.0


def join(start: StartRank, device: torch.device) -> None:
    """Join the default process group. No other process may connect to the ranks: torch's sockets
    authenticate no peer, and its collectives of objects, which plan checkpoints, unpickle.

    So ranks meet through a file in a directory of their user, where TCPStore would listen on every
    interface, and gloo listens on loopback, where it would choose the address of this host's name.
    Ranks of several nodes listen on the one interface by which their nodes reach each other: that
    must be a network of trusted machines, see SECURITY.md.

    NCCL's ranks meet over sockets, too, which need the random number of the communicator, and
    unpickle nothing. NCCL looks for its interface once in a process, at the first communicator: if
    a later one may be that of a broadcast to other machines, it cannot be loopback.
    """
    if not start.host:
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    elif interface := interface_of(start.host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if not (start.nccl_host or start.host):
        os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
    elif interface := interface_of(start.nccl_host or start.host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if start.world == 1:
        join_alone(device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = dist.FileStore(start.rendezvous, start.world)  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(limit)  # its own is five minutes, and NCCL asks it when a rank first computes
    dist.init_process_group(
        _backend(device), store=store, rank=start.rank, world_size=start.world, timeout=limit
    )


def join_alone(device: torch.device) -> None:
    """The group of a single rank, which FSDP needs all the same; no other process can reach it."""
    if dist.is_initialized():
        return  # a test that has several such ranks in one process
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo would look up the name of this host, which may have no address
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _loopback() -> str:
    """The name of the loopback interface: "lo" on Linux, "lo0" on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
