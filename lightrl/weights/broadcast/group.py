"""A group of training ranks and engine workers for broadcasts, beside whatever groups these
processes are members of already.

Owns how it forms, how long anybody waits in it, and its end. Gloo or NCCL: torch's backends without
a process group around them, which would have to be the default one.

It cannot be trusted to end by itself (torch 2.13): gloo often, but not always, notices a dead peer
at once, a stopped one only at the operation's time limit; NCCL notices neither; `abort` of gloo
does not wake who waits; and to destroy a group with work in flight waits for that work, holding the
interpreter. So no member blocks in an operation here (passing.py has a thread for that): it asks
whether that is done, listens to its lifeline meanwhile (rendezvous.py), and whoever leaves
lets a thread wait for what is in flight.
Imports torch; daemons must not import this.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from lightrl.errors import WeightsError, first_line
from lightrl.system.addresses import interface_of, is_loopback
from lightrl.weights.broadcast.passing import Passing, Waiter
from lightrl.weights.broadcast.rendezvous import (
    LOOK_S,
    UNWANTED,
    IsUnwanted,
    Lifeline,
    Membership,
    Rendezvous,
    reach,
)

POLL_S = 0.0005
NEWS_S = 0.2  # after a failed operation, until somebody says whose fault it was
GLOO_THREADS = 3  # for operations of the whole group: the first one only
_never_ended: list[object] = []  # what no thread could wait for: to give it up would wait
# Else NCCL's threads end the process when an operation has failed or takes too long.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


class Group:
    """One member's view of a group. Made by `form`; used by one thread at a time.

    When any operation fails here, or at any other member, the group is over for all of them: every
    call raises WeightsError from then on.
    """

    def __init__(
        self, backend: Any, lifeline: Lifeline, place: Membership, device: torch.device
    ) -> None:
        self._backend: Any = backend
        self._lifeline = lifeline
        self._in_flight: list[tuple[Any, torch.Tensor]] = []
        self._timeout_s = place.timeout_s
        self._looked_at = 0.0  # of time.monotonic()
        self.rank, self.num_ranks, self.world = place.rank, place.num_ranks, place.world
        self.piece_bytes = place.piece_bytes
        self.device = device
        # Whether pieces go from member to member, by `send` and `receive`, or by `broadcast`: that
        # of gloo sends everything log2(world) times over the line of who begins.
        self.is_chain = place.backend == "gloo"
        self._waiter = Waiter() if self.is_chain else None

    @property
    def over(self) -> str | None:
        """Why the group is over; None while it can be used."""
        return self._lifeline.over

    def broadcast(self, data: torch.Tensor, root: int) -> Any:
        """Begins to send or receive `data`, contiguous bytes on `device`; `wait` ends it."""
        return self._begin(
            lambda: self._backend.broadcast([data], _options(root, self._timeout_s)), data
        )

    def send(self, data: torch.Tensor, to: int, tag: int) -> Any:
        """As `broadcast`, to one member, which receives it with the same tag. In a chain only."""
        return self._begin(lambda: self._passed(self._backend.send([data], to, tag)), data)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Any:
        return self._begin(lambda: self._passed(self._backend.recv([data], source, tag)), data)

    def _passed(self, work: Any) -> Any:
        assert self._waiter is not None
        return self._waiter.add(work)

    def _begin(self, operation: Callable[[], Any], data: torch.Tensor) -> Any:
        if self.over is not None:
            raise self._failed()
        try:
            work = operation()
        except RuntimeError as e:
            raise self._failed(e) from e
        self._in_flight.append((work, data))
        return work

    def wait(self, work: Any, is_unwanted: IsUnwanted | None = None) -> None:
        """Until this operation is over. Raises WeightsError, at the latest after timeout_s: who
        waits for one operation after the other has a deadline that moves with progress. Also where
        `is_unwanted` says so, which is asked now and then, whether there is progress or not."""
        deadline = time.monotonic() + self._timeout_s
        self._require_wanted(is_unwanted)
        while not work.is_completed():
            if self.over is not None:
                raise self._failed()
            if time.monotonic() > deadline:
                raise self._failed(f"no progress for {self._timeout_s:g} s at member {self.rank}")
            self._require_wanted(is_unwanted)
            work.rest() if isinstance(work, Passing) else time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as e:
            raise self._failed(e) from e
        self._in_flight = [(w, data) for w, data in self._in_flight if w is not work]

    def abandon(self, why: str) -> None:
        """Ends the group for all members. Returns at once; what is in flight keeps its memory."""
        self._lifeline.cut(why)
        if self._backend is not None:
            if self._waiter is not None:
                self._waiter.close()
            _let_end(self._backend, self._in_flight, self.device)
        self._backend, self._in_flight = None, []

    def _require_wanted(self, is_unwanted: IsUnwanted | None) -> None:
        now = time.monotonic()
        if is_unwanted is not None and now > self._looked_at + LOOK_S:
            self._looked_at = now
            if is_unwanted():
                raise self._failed(UNWANTED)

    def _failed(self, cause: RuntimeError | str | None = None) -> WeightsError:
        why = self._lifeline.wait_over(NEWS_S) if isinstance(cause, RuntimeError) else self.over
        why = why or (
            cause if isinstance(cause, str) else f"member {self.rank}: {first_line(cause)}"
        )
        self.abandon(why)
        return WeightsError(f"broadcast: {why}")


def form(
    meet: Rendezvous | tuple[str, int],
    place: Membership,
    device: torch.device | str,
    is_unwanted: IsUnwanted | None = None,
) -> Group:
    """Forms a group with all others that call this.

    `meet`: where the members meet, the listener for member 0 and its address for the others.
    `device`: where what is sent lies, a CUDA device for "nccl", "cpu" for "gloo". Raises
    WeightsError after place.timeout_s at the latest; member 0 also where `is_unwanted` says so,
    which is asked several times a second, and with it all who have come.
    """
    deadline = time.monotonic() + place.timeout_s
    if isinstance(meet, Rendezvous):
        lifeline, host = meet.gather(place, deadline, is_unwanted), meet.address[0]
    else:
        lifeline, host = reach(meet, place, deadline), meet[0]
    device = torch.device(device)
    try:
        backend = _connect(lifeline, host, place, device, deadline, is_unwanted)
        return Group(backend, lifeline, place, device)
    except (WeightsError, RuntimeError, MemoryError) as e:
        why = first_line(e).removeprefix("broadcast: ")
        lifeline.cut(why)
        raise WeightsError(f"broadcast: {why}") from e


def _connect(
    lifeline: Lifeline,
    host: str,
    place: Membership,
    device: torch.device,
    deadline: float,
    is_unwanted: IsUnwanted | None,
) -> Any:
    """The backend, once all members have theirs. The store listens only meanwhile."""
    if place.rank > 0:
        word, _, there = lifeline.expect(deadline).partition(" ")
        port, own = int(word), lifeline.host
        if is_loopback(own):  # from the machine of member 0: those of others must reach us, too
            own = there
    else:
        port, own = None, lifeline.host

    def make() -> tuple[Any, Any]:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        store = _store(host, port, place) if port is not None else _serve(host, place, lifeline)
        with _environment(_nccl_settings(own) if place.backend == "nccl" else {}):
            backend = _backend(PrefixStore(place.shown_name.hex(), store), own, place)
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            work = backend.broadcast([probe], _options(0, place.timeout_s))  # NCCL connects now
            while not work.is_completed():
                time.sleep(POLL_S)
            work.wait()
        return backend, store

    backend, store = _in_thread(make, lifeline, deadline, is_unwanted)
    try:
        if place.rank > 0:
            lifeline.tell("formed")
            lifeline.expect(deadline)
        else:
            lifeline.expect(deadline, is_unwanted)
            lifeline.tell("ready")
    except WeightsError:
        _let_end(backend, [], device)
        raise
    del store  # from here on nothing listens
    return backend


def _serve(host: str, place: Membership, lifeline: Lifeline) -> TCPStore:
    """Member 0's store, which listens where the rendezvous did; the others are told its port, and
    the address that member 0 has among them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=place.world)
    port = listener.getsockname()[1]
    store = _store(host, port, place, listener.detach())
    lifeline.tell(f"{port} {lifeline.host}")
    return store


def _store(host: str, port: int, place: Membership, listener: int | None = None) -> TCPStore:
    return TCPStore(
        host,
        port,
        place.world,
        listener is not None,
        timedelta(seconds=place.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _backend(store: Any, host: str, place: Membership) -> Any:
    """Gloo listens on `host` only, by which this member reaches member 0."""
    if place.backend == "gloo":
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._threads = GLOO_THREADS
        options._timeout = timedelta(seconds=place.timeout_s)
        return gloo(store, place.rank, place.world, options)
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise RuntimeError(f"this torch has no {place.backend}")
    options = kind.Options()
    options._timeout = timedelta(seconds=place.timeout_s)
    return kind(store, place.rank, place.world, options)


def _nccl_settings(host: str) -> dict[str, str]:
    """NCCL looks for its interface once in a process, so this counts only where the communicator is
    the first; trainer/group.py sees to it that ranks that had one before have the right one."""
    interface = interface_of(host)
    if interface is None or "NCCL_SOCKET_IFNAME" in os.environ:  # as its user wants it
        return NCCL_SETTINGS
    return NCCL_SETTINGS | {"NCCL_SOCKET_IFNAME": f"={interface}"}


def _options(root: int, timeout_s: float) -> Any:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _in_thread(
    make: Callable[[], Any], lifeline: Lifeline, deadline: float, is_unwanted: IsUnwanted | None
) -> Any:
    """What `make` returns; does not wait for it when the group is over before it is made."""
    done = threading.Event()
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(make())
        except (RuntimeError, OSError, MemoryError) as e:
            result.append(e)
        done.set()

    threading.Thread(target=run, daemon=True, name="broadcast forms").start()
    while not done.wait(0.01):
        if lifeline.over is not None:
            raise WeightsError(f"broadcast: {lifeline.over}")
        if time.monotonic() > deadline:
            raise WeightsError("broadcast: the group did not form in time")
        if is_unwanted is not None and is_unwanted():
            raise WeightsError(f"broadcast: {UNWANTED}")
    if isinstance(result[0], Exception):
        why = lifeline.wait_over(NEWS_S) or f"cannot form: {first_line(result[0])}"
        raise WeightsError(f"broadcast: {why}") from result[0]
    return result[0]


def _let_end(backend: Any, in_flight: list[tuple[Any, torch.Tensor]], device: torch.device) -> None:
    """A thread keeps all of it until the operations are over, so that nobody waits for them and
    none of them touches memory of others; an NCCL backend for ever."""

    def run() -> None:
        if device.type == "cuda":
            backend.abort()
            threading.Event().wait()
        while not all(work.is_completed() for work, _ in in_flight):
            time.sleep(0.05)

    try:
        threading.Thread(target=run, daemon=True, name="broadcast ends").start()
    except RuntimeError:  # no memory for a thread
        _never_ended.append((backend, in_flight))


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Of this process while a backend reads it."""
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
