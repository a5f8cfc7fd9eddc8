"""Members of broadcast groups as processes of their own, forked where torch is imported already.

What a test asks of them and what they report; imported by the fork server, too.
"""

import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lightrl.errors import WeightsError
from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.system.addresses import join_address
from lightrl.weights.broadcast.group import WorkerGroup, form, listen
from lightrl.weights.broadcast.membership import Membership
from lightrl.weights.broadcast.transfer import receive, send
from lightrl.weights.version.layout import num_bytes, plan
from lightrl.weights.version.manifest import Manifest, hash_buckets

HOST = "127.0.0.1"
Entries = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Fault:
    """`member` sends itself `signal` at this tensor of the first version; rank 0 before it."""

    member: int
    signal: int
    tensor: int = 0


@dataclass(frozen=True)
class Plan:
    """What each member of a group is to do."""

    entries: Entries
    num_receivers: int = 3
    versions: int = 1
    timeout_s: float = 20.0
    fault: Fault | None = None

    @property
    def world(self) -> int:
        return 1 + self.num_receivers


@dataclass(frozen=True)
class Report:
    """How it ended for one member: `error` is None if all versions arrived as they were sent."""

    rank: int
    error: str | None = None
    at: float = 0.0  # time.monotonic()
    names: tuple[str, ...] = ()
    num_right: int = 0  # versions whose every tensor was compared and found equal


def version(entries: Entries, number: int) -> tuple[Manifest, torch.Tensor]:
    """The manifest of a version, and its file, whose bytes differ for each number."""
    tensors = plan(entries)
    generator = torch.Generator().manual_seed(number)
    data = torch.zeros(num_bytes(tensors), dtype=torch.uint8)
    for t in tensors:
        part = torch.randint(0, 256, (t.num_bytes,), generator=generator, dtype=torch.uint8)
        # no other bools are valid
        data[t.offset : t.offset + t.num_bytes] = part % 2 if t.dtype == "bool" else part
    return Manifest(tensors, len(data), hash_buckets(memoryview(data.numpy()))), data


def membership(rank: int, world: int, address: str, timeout_s: float = 20.0) -> Membership:
    return Membership(BroadcastGroup("name", address, rank, world, "gloo"), timeout_s)


def be_member(rank: int, what: Plan, address: str, name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = None
    if rank == 0:
        store = listen(HOST, what.world, what.timeout_s)
        address = join_address(HOST, store.port)
        pipe.send(address)
    place = BroadcastGroup(name, address, rank, what.world, "gloo")
    try:
        group = form(Membership(place, what.timeout_s), "cpu", store)
        pipe.send("formed")
        report = Report(rank)
        for number in range(1, what.versions + 1):
            report = _take_part(group, what, rank, number, report)
        # what was sent last may be on its way still
        pipe.send(replace(report, at=time.monotonic()))
        pipe.recv()
    except WeightsError as e:
        pipe.send(Report(rank, str(e), time.monotonic()))
    except (EOFError, BrokenPipeError):
        pass


def _take_part(group: WorkerGroup, what: Plan, rank: int, number: int, so_far: Report) -> Report:
    manifest, data = version(what.entries, number)
    if rank == 0:
        _fail(what, rank, 0)
        send(group, data)
        return so_far
    kept: list[tuple[str, torch.Tensor]] = []
    for i, named in enumerate(receive(group, manifest)):
        _fail(what, rank, i)
        kept.append(named)  # compared at the end: nothing may have changed it since
    is_right = len(kept) == len(manifest.tensors)
    for spec, (_, tensor) in zip(manifest.tensors, kept, strict=True):
        is_right &= tuple(tensor.shape) == spec.shape and str(tensor.dtype) == f"torch.{spec.dtype}"
        flat = data[spec.offset : spec.offset + spec.num_bytes]
        is_right &= torch.equal(tensor.reshape(-1).view(torch.uint8), flat)
    names = tuple(name for name, _ in kept)
    return replace(so_far, names=names, num_right=so_far.num_right + is_right)


def _fail(what: Plan, rank: int, tensor: int) -> None:
    fault = what.fault
    if fault and (rank, tensor) == (fault.member, fault.tensor):
        os.kill(os.getpid(), fault.signal)


class Members:
    """The processes of one group, and their reports."""

    def __init__(self, processes: list[Any], pipes: list[Connection]) -> None:
        self.processes = processes
        self.pipes = pipes

    def reports(self, deadline_s: float, ranks: Sequence[int] = ()) -> dict[int, Report]:
        """Of these members, of all by default. A member that ends without a report has none."""
        until = time.monotonic() + deadline_s
        missing = {self.pipes[r]: r for r in ranks or range(len(self.pipes))}
        found: dict[int, Report] = {}
        while missing:
            ready = wait(list(missing), max(0.0, until - time.monotonic()))
            assert ready, f"members {sorted(missing.values())} hang"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    received = pipe.recv()
                except (EOFError, ConnectionResetError):
                    del missing[pipe]
                    continue
                if isinstance(received, Report):
                    found[received.rank] = received
                    del missing[pipe]
        return found

    def await_formed(self, deadline_s: float = 90.0) -> None:
        for pipe in self.pipes:
            assert pipe.poll(deadline_s)
            assert pipe.recv() == "formed"

    def signal(self, member: int, number: int) -> None:
        os.kill(self.processes[member].pid, number)


@contextmanager
def members(what: Plan) -> Iterator[Members]:
    """Started, and gone at the end, whatever has happened to them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    address = ""
    name = secrets.token_hex(16)
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(what.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=be_member, args=(rank, what, address, name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
            if rank == 0:
                assert ours.poll(90)
                address = ours.recv()
        yield Members(processes, pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.kill()
            process.join()
            process.close()
