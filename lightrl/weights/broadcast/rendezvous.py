"""Where the members of a broadcast group meet, and how each learns at once that the group is over.

Owns the connections that every other member keeps to member 0 for as long as the group lives. They
carry no weights: first a few words while the group forms, later only why it is over. Whose
connection ends is gone, and member 0 tells all others: a collective would show it late, or, where
it waits for somebody else, never. Must not import torch.
"""

import contextlib
import errno
import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from blake3 import blake3

from lightrl.errors import WeightsError
from lightrl.system.addresses import is_loopback
from lightrl.weights.version.layout import BUCKET_BYTES

LOOK_S = 0.1  # at whether what one waits for is wanted still
HELLO_S = 2.0  # from a connection to its whole hello
MAX_PENDING = 64  # connections without a hello; the oldest makes room
MAX_WORD = 300  # bytes
CUT_S = 1.0  # to tell all others that it is over
UNWANTED = "it is not wanted any more"  # why a member leaves that is to pull instead
NO_WAY = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
_HELLO = struct.Struct("<32sI")

IsUnwanted: TypeAlias = Callable[[], bool]  # whether what is at work is of no use any more


class Unreachable(WeightsError):
    """Member 0 cannot be reached at its address, as when the group is over."""


class OutOfReach(Unreachable):
    """Nobody answers at that address until the deadline, or there is no way to it."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One member's place in a group. Comes over the encrypted channel.

    Example: Membership("7c1f...", rank=2, num_ranks=2, world=4, backend="gloo", timeout_s=30.0)
    """

    # known to the members only, used for one group
    name: str
    # training ranks first
    rank: int
    num_ranks: int
    world: int
    # "gloo" or "nccl", the same for all
    backend: str
    # how long a member waits while nothing moves
    timeout_s: float
    # of one operation, at most
    piece_bytes: int = BUCKET_BYTES

    @property
    def shown_name(self) -> bytes:
        """What members show each other in the clear. Tells nobody the name, of which the numbers of
        the proof are made."""
        return blake3(self.name.encode()).digest()


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """To a rank or an engine: become a member of a broadcast group; answered by GroupJoined. An
    engine generates nothing until then. `address` is of no use to rank 0.

    `place` is that of the engine's first worker, the others follow it. Example:
    JoinGroup("10.0.0.1:41873", Membership("7c1f...", 2, 2, 4, "gloo", 30.0))
    """

    address: str
    place: Membership


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """`error`: why it is not a member, in one line; the rank or the engine goes on."""

    name: str
    error: str | None = None
    # for an engine: nobody answers for the ranks at that address; not: nobody listens there any
    # more
    is_unreachable: bool = False


class Rendezvous:
    """The listener of member 0; its address goes to the others over the encrypted channel."""

    def __init__(self, host: str) -> None:
        """Listens on this address of the machine only, 0.0.0.0 = all, on a free port. Raises
        WeightsError."""
        self._pending: dict[socket.socket, tuple[float, bytearray]] = {}
        try:
            self._listener = socket.create_server(
                (host, 0),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=MAX_PENDING,
            )
        except OSError as e:
            raise WeightsError(f"broadcast: cannot listen on {host}: {e}") from e
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])

    def close(self) -> None:
        """Whoever has come, or is at the door, finds the connection closed."""
        self._listener.close()
        for sock in self._pending:
            sock.close()
        self._pending.clear()

    def gather(
        self, place: Membership, deadline: float, is_unwanted: IsUnwanted | None = None
    ) -> "Lifeline":
        """Waits for members 1 to world - 1, who know the name; others are shown the door.

        Raises WeightsError at the deadline (time.monotonic()), or where `is_unwanted` says so. The
        listener is closed in any case.
        """
        wait_s = HELLO_S if is_unwanted is None else LOOK_S
        secret, world = place.shown_name, place.world
        members: dict[int, socket.socket] = {}
        try:
            while len(members) < world - 1:
                if (left := deadline - time.monotonic()) <= 0:
                    missing = sorted(set(range(1, world)) - set(members))
                    raise WeightsError(f"broadcast: members {missing} of {world} did not come")
                if is_unwanted is not None and is_unwanted():
                    raise WeightsError(f"broadcast: {UNWANTED}")
                for sock, rank in self._hellos(min(left, wait_s), secret):
                    if 0 < rank < world and rank not in members:
                        members[rank] = sock
                    else:
                        sock.close()
            return Lifeline(members)
        except BaseException:
            for sock in members.values():
                sock.close()
            raise
        finally:
            self.close()

    def _hellos(self, wait_s: float, secret: bytes) -> list[tuple[socket.socket, int]]:
        """Connections that have said who they are in this turn."""
        now = time.monotonic()
        for sock in [s for s, (since, _) in self._pending.items() if now > since + HELLO_S]:
            self._drop(sock)
        with selectors.DefaultSelector() as selector:
            for sock in (self._listener, *self._pending):
                selector.register(sock, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(wait_s)]
        said: list[tuple[socket.socket, int]] = []
        for sock in ready:
            if sock is self._listener:
                self._accept(now)
            elif isinstance(sock, socket.socket) and (rank := self._read(sock, secret)) is not None:
                said.append((sock, rank))
        return said

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            if len(self._pending) >= MAX_PENDING:
                self._drop(next(iter(self._pending)))
            self._pending[sock] = (now, bytearray())

    def _read(self, sock: socket.socket, secret: bytes) -> int | None:
        if sock not in self._pending:  # it has just made room for another one
            return None
        _, data = self._pending[sock]
        try:
            part = sock.recv(_HELLO.size - len(data))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        data += part
        if part and len(data) < _HELLO.size:
            return None
        said, rank = _HELLO.unpack(data) if len(data) == _HELLO.size else (b"", 0)
        if not hmac.compare_digest(said, secret):
            self._drop(sock)
            return None
        del self._pending[sock]
        return rank

    def _drop(self, sock: socket.socket) -> None:
        del self._pending[sock]
        sock.close()


def reach(address: tuple[str, int], place: Membership, deadline: float) -> "Lifeline":
    """Connects to member 0. Raises Unreachable, OutOfReach if no group there can be reached."""
    try:
        sock = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
        sock.sendall(_HELLO.pack(place.shown_name, place.rank))
    except OSError as e:
        host, port = address
        # who is refused, or cut off, has reached the machine; who lacks a descriptor has not tried
        kind = OutOfReach if isinstance(e, TimeoutError) or e.errno in NO_WAY else Unreachable
        raise kind(f"broadcast: member 0 at {host}:{port} cannot be reached: {e}") from e
    return Lifeline({0: sock})


class Lifeline:
    """The connections of one member: to all others if it is member 0, else to that one.

    Over once somebody has cut it, here or elsewhere, or a peer is gone; never again as before.
    """

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        """Owns these sockets from now on."""
        self._peers = peers
        self._changed = threading.Condition()
        self._heard: dict[int, list[str]] = {rank: [] for rank in peers}
        self._over: str | None = None
        self._is_ending = False  # somebody tells the peers
        self._is_cut = threading.Event()  # the peers have been told
        for sock in peers.values():
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # by which this member reaches its peers; not loopback if it is not for all of them
        hosts = sorted({sock.getsockname()[0] for sock in peers.values()}, key=is_loopback)
        self.host: str = hosts[0] if hosts else ""
        threading.Thread(target=self._listen, daemon=True, name="broadcast lifeline").start()

    @property
    def over(self) -> str | None:
        """Why it is over: one line; None while all are there."""
        return self._over

    def tell(self, word: str) -> None:
        """To each peer. What cannot be said is noticed where they are listened to."""
        for sock in self._peers.values():
            with contextlib.suppress(OSError):
                sock.sendall(word.encode(errors="replace")[: MAX_WORD - 1] + b"\n")

    def expect(self, deadline: float, is_unwanted: IsUnwanted | None = None) -> str:
        """Waits for one word of each peer; the last one's. Raises WeightsError, also where
        `is_unwanted` says so."""
        while not self._has_heard(min(LOOK_S, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                break
            if is_unwanted is not None and is_unwanted():
                raise WeightsError(f"broadcast: {UNWANTED}")
        with self._changed:
            if self._over is not None:
                raise WeightsError(f"broadcast: {self._over}")
            if silent := [rank for rank, words in self._heard.items() if not words]:
                raise WeightsError(f"broadcast: no word of members {silent} while the group forms")
            return [words.pop(0) for words in self._heard.values()][-1]

    def _has_heard(self, wait_s: float) -> bool:
        """A word of each peer, or that it is over."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._over is not None or all(self._heard.values()), max(0.0, wait_s)
            )

    def wait_over(self, timeout_s: float) -> str | None:
        """Gives the news that somebody is gone a moment to arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._over is not None, timeout_s)
            return self._over

    def cut(self, why: str) -> None:
        """All others learn it, too, and first: who learns it here may end this process.

        Returns at once; does nothing where it is over already.
        """
        with self._changed:
            if self._is_ending:
                self._changed.wait_for(lambda: self._over is not None, CUT_S)
                return
            self._is_ending = True
        self.tell(f"over: {why}")
        with self._changed:
            self._over = why
            self._changed.notify_all()
        for sock in self._peers.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._is_cut.set()

    def _listen(self) -> None:
        """The thread: until it is over."""
        data = {rank: bytearray() for rank in self._peers}
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._peers.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            while self._over is None and self._peers:
                for key, _ in selector.select():
                    if (why := self._hear(key.data, data[key.data])) is not None:
                        self.cut(why)
                        break
        self._is_cut.wait()
        for sock in self._peers.values():
            sock.close()

    def _hear(self, rank: int, data: bytearray) -> str | None:
        """Why it is over, if what a peer says or does is the end."""
        try:
            part = self._peers[rank].recv(MAX_WORD)
        except OSError:
            part = b""
        data += part
        while b"\n" in data:
            line, _, rest = bytes(data).partition(b"\n")
            data[:] = rest
            word = line.decode(errors="replace")
            if word.startswith("over: "):
                return word.removeprefix("over: ")
            with self._changed:
                self._heard[rank].append(word)
                self._changed.notify_all()
        if not part or len(data) > MAX_WORD:
            return f"member {rank} is gone"
        return None
