"""A process group of training rank 0 and engine workers, beside whatever groups these processes
have.

Owns how it forms, the thread that runs its operations, and how it ends. Gloo or NCCL: torch's
backends without a default group around them. A blocked operation of gloo ends at its time limit
only, one of NCCL not before an abort. So all of them run in a daemon thread of the group, and its
caller waits for a limited time; the thread of a failed group is left behind. A member learns of a
failure elsewhere by an error, by the time limit, or from the coordinator (`is_unwanted`).
Imports torch; daemons must not import this.
"""

import atexit
import concurrent.futures
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from lightrl.errors import WeightsError, first_line
from lightrl.system.addresses import WILDCARD, interface_of, is_loopback, own_host, split_known
from lightrl.weights.broadcast.membership import (
    IN_FLIGHT,
    NCCL_SETTINGS,
    UNWANTED,
    IsUnwanted,
    Membership,
)

Result = TypeVar("Result")

# At the end of a process: a thread that ends gloo just then would abort the process.
JOIN_S = 1.0
LOOK_S = 0.1  # between two looks at whether the transfer is still wanted
CLOSED = ("Connection closed", "Connection reset", "Broken pipe")  # gloo's words for one event
FAILURES = (WeightsError, RuntimeError, OSError, MemoryError)
_aborted: list[object] = []  # NCCL groups, whose destruction could block


class WorkerGroup:
    """One member's end of a group, made by `form`. After any failure it is over: every call raises
    WeightsError, and the caller leaves the rest to the other members' limits."""

    def __init__(self, membership: Membership, device: torch.device) -> None:
        self._membership = membership
        self.device = device
        self.over: str | None = None  # why the group is over
        self._backend: Any = None
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()  # in progress
        self._tag = 0
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="broadcast")
        self._thread.start()

    @property
    def name(self) -> str:
        return self._membership.group.name

    def submit(self, operation: Callable[[], Result]) -> "Future[Result]":
        """Run `operation` in the group's thread, after those before it."""
        result: Future[Result] = Future()
        self._jobs.put((operation, result))
        return result

    def wait(self, result: "Future[Result]", is_unwanted: IsUnwanted | None = None) -> Result:
        """The result of a submitted operation.

        Raises WeightsError, and the group is over: when the operation fails or does not end in
        time, or as soon as `is_unwanted`.
        """
        deadline = time.monotonic() + self._membership.timeout_s
        while self.over is None and not result.done():
            if is_unwanted is not None and is_unwanted():
                self.abort(UNWANTED)
            elif time.monotonic() > deadline:
                self.abort(f"no progress for {self._membership.timeout_s:g} s")
            else:
                concurrent.futures.wait((result,), LOOK_S)
        if self.over is not None:
            raise WeightsError(f"broadcast: {self.over}")
        try:
            return result.result()
        except FAILURES as e:
            self.abort(first_line(e).removeprefix("broadcast: "))
            raise WeightsError(f"broadcast: {self.over}") from e

    def abort(self, why: str) -> None:
        """End the group here. Never blocks: what is in flight keeps its thread and its memory."""
        if self.over is not None:
            return
        self.over = why
        self._jobs.put(None)
        atexit.register(self._thread.join, JOIN_S)
        if self._backend is not None and self.device.type == "cuda":  # this ends its kernels
            _aborted.append(self._backend)
            with suppress(RuntimeError):
                threading.Thread(target=self._backend.abort, daemon=True).start()

    # In the group's thread

    def broadcast(self, data: torch.Tensor) -> None:
        """Send `data`, contiguous bytes on `device`, from rank 0, or receive it elsewhere.

        Over gloo each member passes it on to the next one: every line carries it once, where gloo's
        own broadcast sends it log2(world) times over that of rank 0.
        """
        group = self._membership.group
        if group.backend == "nccl":
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._backend.broadcast([data], options).wait()
            torch.cuda.current_stream(self.device).synchronize()
            return
        self._tag += 1
        if group.rank > 0:
            with _naming(group.rank - 1):
                self._backend.recv([data], group.rank - 1, self._tag).wait()
        if group.rank + 1 < group.world:
            with _naming(group.rank + 1):
                work = self._backend.send([data], group.rank + 1, self._tag)
            self._sends.append((work, data))
            self.flush(IN_FLIGHT - 1)

    def flush(self, num_left: int = 0) -> None:
        """Wait until at most `num_left` buckets are being passed on."""
        while len(self._sends) > num_left:
            work, _ = self._sends.popleft()
            with _naming(self._membership.group.rank + 1):
                work.wait()

    def connect(self, store: TCPStore | None) -> None:
        """Meet the other members at rank 0's store, which is `store` in rank 0."""
        group, timeout = self._membership.group, timedelta(seconds=self._membership.timeout_s)
        if (address := split_known(group.address)) is None:
            raise WeightsError(f"{group.address[:80]}: not an address")
        host, port = address
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if store is None:
            store = TCPStore(host, port, group.world, timeout=timeout, wait_for_workers=False)
        members = PrefixStore(group.name, store)
        if group.rank > 0:
            members.set(f"host-{group.rank}", host)
        else:
            members.set("host", _common_host(host, members, group.world))
        own = own_host(members.get("host").decode())
        make = _gloo if group.backend == "gloo" else _nccl
        self._backend = make(members, group.rank, group.world, timeout, own)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            operation, result = job
            try:
                if self.over is not None:
                    raise WeightsError(self.over)
                result.set_result(operation())
            except FAILURES as e:
                result.set_exception(e)
            del job, operation, result
        for work, _ in self._sends:  # to destroy gloo before would wait with the interpreter's lock
            with suppress(RuntimeError):
                work.wait()
        self._sends.clear()
        self._backend = None


@contextmanager
def _naming(member: int) -> Iterator[None]:
    """Raise WeightsError where gloo reports that the connection to this member has ended."""
    try:
        yield
    except RuntimeError as e:
        if any(words in str(e) for words in CLOSED):
            raise WeightsError(f"member {member} is gone") from e
        raise


def _common_host(host: str, members: PrefixStore, world: int) -> str:
    """The address of rank 0's machine that all members can reach: the one at which it listens, or
    if it listens at all of them, one by which members reach it; loopback only if all use that."""
    if host != WILDCARD:
        return host
    hosts = [members.get(f"host-{rank}").decode() for rank in range(1, world)]
    return min(hosts, key=is_loopback)


def listen(host: str, world: int, timeout_s: float) -> TCPStore:
    """Rank 0's store, which listens on this address of the machine only, 0.0.0.0 = all, on a free
    port. Raises WeightsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=world)
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            world,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as e:
        raise WeightsError(f"broadcast: cannot listen on {host}: {first_line(e)}") from e


def form(
    membership: Membership,
    device: torch.device | str,
    store: TCPStore | None = None,
    is_unwanted: IsUnwanted | None = None,
) -> WorkerGroup:
    """Form a group with all others that call this.

    `device`: of the data, a CUDA device for "nccl", "cpu" for "gloo". `store`: in rank 0, from
    `listen`. Raises WeightsError after the time limit at the latest.
    """
    try:
        group = WorkerGroup(membership, torch.device(device))
    except RuntimeError as e:  # no memory for a thread
        raise WeightsError(f"broadcast: {first_line(e)}") from e
    group.wait(group.submit(partial(group.connect, store)), is_unwanted)
    return group


def _gloo(store: Any, rank: int, world: int, timeout: timedelta, host: str) -> Any:
    """Gloo listens on `host` only, by which this member reaches rank 0."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, world, options)


def _nccl(store: Any, rank: int, world: int, timeout: timedelta, host: str) -> Any:
    """NCCL looks for its interface once in a process, so this counts only where the communicator is
    the first; trainer/group.py sees to ranks that had one before."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise WeightsError("this torch has no nccl")
    options = kind.Options()
    options._timeout = timeout
    if interface := interface_of(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    with _environment(NCCL_SETTINGS):
        return kind(store, rank, world, options)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables of this process while a backend reads them."""
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
