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
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.pieces import rows
from lightrl.weights.broadcast.proof import Proof
from lightrl.weights.broadcast.rendezvous import Membership, Rendezvous
from lightrl.weights.broadcast.transfer import receive, send
from lightrl.weights.version.layout import TensorSpec, plan

SEED = bytes(range(32))


@dataclass(frozen=True)
class Fault:
    """`member` sends itself `signal` at this tensor of this version."""

    member: int
    signal: int
    tensor: int
    policy_version: int = 1


@dataclass(frozen=True)
class Plan:
    """What each member of a group is to do."""

    entries: tuple[tuple[str, str, tuple[int, ...]], ...]
    num_ranks: int = 2
    num_receivers: int = 2
    versions: int = 1
    timeout_s: float = 20.0
    piece_bytes: int = 1 << 16
    fault: Fault | None = None
    waits_for_word: bool = False  # between versions
    is_chain: bool = True  # else as with NCCL

    @property
    def world(self) -> int:
        return self.num_ranks + self.num_receivers

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return plan(self.entries)


@dataclass(frozen=True)
class Report:
    """How it ended for one member: `error` is None if all versions arrived as they were sent."""

    rank: int
    error: str | None
    at: float  # time.monotonic()
    sums: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = ()
    num_right: int = 0  # versions whose every tensor was compared and found equal


def content(spec: TensorSpec, policy_version: int) -> torch.Tensor:
    """Whole, and different for each tensor and version."""
    seed = hash((spec.offset, policy_version))
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (spec.num_bytes,), generator=generator, dtype=torch.uint8)
    if spec.dtype == "bool":  # no others are valid
        data %= 2
    return data.view(getattr(torch, spec.dtype)).view(spec.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN or not."""
    flat = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat[0], flat[1])


def be_member(rank: int, what: Plan, meet: Any, name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sizes = (what.num_ranks, what.world)
    place = Membership(name, rank, *sizes, "gloo", what.timeout_s, what.piece_bytes)
    if meet is None:
        meet = Rendezvous("127.0.0.1")
        pipe.send(meet.address)
    try:
        group = form(meet, place, "cpu")
        group.is_chain = what.is_chain
        pipe.send("formed")
        report = Report(rank, None, 0.0)
        for policy_version in range(1, what.versions + 1):
            if what.waits_for_word:
                pipe.recv()
            if rank < what.num_ranks:
                report = _send(group, what, rank, policy_version, report)
            else:
                report = _receive(group, what, rank, policy_version, report)
        # what was sent last may be on its way still
        pipe.send(replace(report, at=time.monotonic()))
        pipe.recv()
    except WeightsError as e:
        pipe.send(Report(rank, str(e), time.monotonic()))
    except (EOFError, BrokenPipeError):
        pass


def _send(group: Any, what: Plan, rank: int, policy_version: int, so_far: Report) -> Report:
    proof = Proof(SEED)
    tensors = what.tensors

    def of_rank(i: int) -> torch.Tensor:
        _fail(what, rank, policy_version, i)
        whole = content(tensors[i], policy_version)
        if not whole.shape:
            return whole
        first, end = rows(len(whole), rank, what.num_ranks)
        return whole[first:end].clone()

    send(group, tensors, of_rank)
    for i, spec in enumerate(tensors):
        if spec.shape or rank == 0:
            mine = of_rank(i)
            first = rows(spec.shape[0], rank, what.num_ranks)[0] if spec.shape else 0
            row = spec.num_bytes // max(1, spec.shape[0] if spec.shape else 1)
            proof.add(mine, spec.offset + first * row)
    return replace(so_far, sums=(*so_far.sums, proof.sums()))


def _receive(group: Any, what: Plan, rank: int, policy_version: int, so_far: Report) -> Report:
    proof = Proof(SEED)
    kept: list[tuple[str, torch.Tensor]] = []
    for i, (name, tensor) in enumerate(receive(group, what.tensors, proof)):
        _fail(what, rank, policy_version, i)
        kept.append((name, tensor))  # compared at the end: nothing may have changed it since
    by_name = {spec.name: spec for spec in what.tensors}
    right = all(same(t, content(by_name[name], policy_version)) for name, t in kept)
    return replace(
        so_far,
        sums=(*so_far.sums, proof.sums()),
        names=tuple(name for name, _ in kept),
        num_right=so_far.num_right + right,
    )


def _fail(what: Plan, rank: int, policy_version: int, tensor: int) -> None:
    fault = what.fault
    if fault and (rank, policy_version, tensor) == (
        fault.member,
        fault.policy_version,
        fault.tensor,
    ):
        os.kill(os.getpid(), fault.signal)


class Members:
    """The processes of one group, and what they say."""

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
                    said = pipe.recv()
                except (EOFError, ConnectionResetError):
                    del missing[pipe]
                    continue
                if isinstance(said, Report):
                    found[said.rank] = said
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
    meet: Any = None
    name = secrets.token_hex(16)
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(what.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=be_member, args=(rank, what, meet, name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
            if rank == 0:
                assert ours.poll(90)
                meet = ours.recv()
        yield Members(processes, pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.kill()
            process.join()
            process.close()
