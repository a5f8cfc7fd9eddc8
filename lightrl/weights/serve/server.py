"""The holder's side of a weight pull: what a node holds of the weights, over TCP, to nodes with a
ticket.

Owns what is held and the connections of those who have shown a ticket; `door.py` has the others.
The event loop only accepts, reads requests and waits; threads move the bytes. Must not import
torch; decides neither which versions exist nor who may have them. What is said is in `request.py`.

A ticket is for one node and one version of one holder (lightrl/tickets.py); for what is not held
any more it gets nothing. Waiting costs a descriptor and nothing else: any number of nodes wait for
their turn, and are told so.
"""

import asyncio
import contextlib
import hmac
import resource
import secrets
import socket
from collections import Counter
from collections.abc import Sequence

from lightrl.errors import ProtocolError, WeightsError
from lightrl.system.addresses import join_address
from lightrl.tickets import pull_ticket
from lightrl.weights.serve.door import Door
from lightrl.weights.serve.held import Held, Partial
from lightrl.weights.serve.request import (
    ALL,
    ASK_HAVE,
    ASK_SHARED,
    BUSY,
    DATA,
    MISSING,
    PART,
    QUEUED,
    RECORD,
    SIGN_S,
    Request,
    num_missing,
    unpack,
)
from lightrl.weights.serve.send import IDLE_LIMIT_S, Sender
from lightrl.weights.serve.turns import Turns
from lightrl.weights.version.manifest import VersionFile

MAX_CONNECTIONS = 4096  # with a ticket; fewer where this process may not open as many files
MAX_CALLERS = 512  # without one, likewise
MAX_OF_A_NODE = 16  # connections: a node that has gone bad must not have them all
MAX_HELD = 64  # versions and differences between them
TURNS_AT_ONCE = 64  # requests that are answered at once
SHARED_TURNS = 3  # of those who pass on what they get: the sooner the first of them has it
CROWD = 4 * TURNS_AT_ONCE  # connections from which on each node has only one
BACKLOG = 4096  # peers that wait to be accepted; the kernel may allow fewer
RETIRE_S = 2.0


class WeightServer:
    """Serves versions to nodes with a ticket. `await start(hosts)` once, `await close()` at the
    end.

    One for each daemon. Names of things are digests; a difference between versions is published
    like a version. While a file is served, the server holds `flock LOCK_SH` on it.
    """

    def __init__(
        self, max_connections: int = MAX_CONNECTIONS, max_bytes_per_s: float | None = None
    ) -> None:
        """`max_bytes_per_s`: what all peers together get, None = what the line can take."""
        self._secret = secrets.token_hex(16)
        self._addresses: tuple[str, ...] = ()
        self._held: dict[bytes, Held] = {}  # by digest
        self._changed = asyncio.Event()  # of what is held; replaced after each change
        self._max_connections = max_connections
        self._sender = Sender(max_bytes_per_s)
        self._door: Door | None = None
        self._connections: dict[asyncio.Task[None], bytes] = {}  # and the nodes that they belong to
        self._num_of: Counter[bytes] = Counter()  # connections of each node
        self._sending: dict[asyncio.Task[None], Held] = {}
        self._turns, self._shared_turns = Turns(TURNS_AT_ONCE), Turns(SHARED_TURNS)

    @property
    def secret(self) -> str:
        """From which tickets are made (tickets.pull_ticket); new in every process."""
        return self._secret

    @property
    def addresses(self) -> tuple[str, ...]:
        """ "host:port" of each host listened on, for WeightsEndpoint."""
        return self._addresses

    async def start(self, hosts: str | Sequence[str], port: int = 0) -> tuple[str, ...]:
        """Listens on `port` of each of `hosts`, 0 = any; returns `addresses`. Raises WeightsError
        if it cannot."""
        listeners: dict[str, socket.socket] = {}
        try:
            for host in (hosts,) if isinstance(hosts, str) else hosts:
                listeners[host] = await _listen(host, port)
        except WeightsError:
            for listener in listeners.values():
                listener.close()
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = min(self._max_connections, limit // 2)
        self._door = Door(min(MAX_CALLERS, limit // 4), self._admit)
        for listener in listeners.values():
            self._door.open(listener)
        ports = ((host, sock.getsockname()[1]) for host, sock in listeners.items())
        self._addresses = tuple(join_address(host, port) for host, port in ports)
        return self._addresses

    def publish(self, file: VersionFile) -> None:
        """From now on serves the version in `file`, which is complete and proved; its name may go.

        The same digest again, as another policy_version, adds that version's tickets. Opens two
        files, reads nothing. Raises WeightsError: the file is not there or has another size, it is
        being overwritten (LOCK_EX), too many (MAX_HELD) are served.
        """
        self._hold(file, is_complete=True)

    def serve_partial(self, file: VersionFile) -> Partial:
        """Serves what is marked as proved of a file (of full size, at `file.path`) that is being
        filled; its manifest is there. `Pull` does this when it is given a server."""
        return Partial(self._hold(file, is_complete=False))

    def retire(self, digest: str, grace_s: float = RETIRE_S) -> asyncio.Future[None]:
        """Nothing of it is served from now on; one that is not served is retired already.

        The future is done when nobody reads the file any more and its lock is released: requests
        under way have `grace_s` to end, then are cut. Files are closed in a thread.
        """
        loop = asyncio.get_running_loop()
        held = self._held.pop(bytes.fromhex(digest), None)
        if held is None:
            retired = loop.create_future()
            retired.set_result(None)
            return retired
        retired = held.retire()
        if not retired.done():
            cut = loop.call_later(grace_s, self._cut, held)
            retired.add_done_callback(lambda _: cut.cancel())
        return retired

    async def close(self) -> None:
        """Stops serving at once; transfers under way are cut."""
        if self._door is not None:
            self._door.close()
            self._door = None
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.gather(*(self.retire(digest.hex()) for digest in list(self._held)))
        self._sender.close()

    def _hold(self, file: VersionFile, *, is_complete: bool) -> Held:
        digest = bytes.fromhex(file.digest)
        held = self._held.get(digest)
        if held is not None and is_complete and held.is_complete:
            held.policy_versions.add(file.policy_version)
        else:
            if held is None and len(self._held) >= MAX_HELD:
                raise WeightsError(f"{MAX_HELD} versions are served, which is as many as may be")
            fresh = Held(file, is_complete)
            if held is not None:
                fresh.policy_versions |= held.policy_versions
                self.retire(file.digest)
            held = self._held[digest] = fresh
        self._changed.set()
        self._changed = asyncio.Event()
        return held

    def _cut(self, held: Held) -> None:
        for task, theirs in self._sending.items():
            if theirs is held:
                task.cancel()

    def _admit(self, sock: socket.socket, request: Request) -> None:
        """Takes a connection from the door, with its first request."""
        if not self._admits(request):
            sock.close()
        elif not self._has_place(request.node):
            with contextlib.suppress(OSError):
                sock.send(BUSY)
            sock.close()
        else:
            task = asyncio.get_running_loop().create_task(self._serve(sock, request))
            self._connections[task] = request.node
            self._num_of[request.node] += 1
            task.add_done_callback(lambda task: self._ended(task, sock))

    def _admits(self, request: Request) -> bool:
        """Whether the ticket is right and, of what is held, there is such a range."""
        node = request.node.decode(errors="replace")
        expected = pull_ticket(self._secret, node, request.policy_version).encode()
        held = self._find(request)
        return hmac.compare_digest(request.ticket, expected) and (held is None or held.has(request))

    def _find(self, request: Request) -> Held | None:
        """What is asked of, if it belongs to the version that the ticket is for."""
        held = self._held.get(request.digest)
        return held if held is not None and request.policy_version in held.policy_versions else None

    def _has_place(self, node: bytes) -> bool:
        """Where there are many, a node gets the one connection that it needs."""
        theirs, all_of_them = self._num_of[node], len(self._connections)
        return (
            theirs < MAX_OF_A_NODE
            and all_of_them < self._max_connections
            and (theirs == 0 or all_of_them < CROWD)
        )

    def _is_spare(self, node: bytes) -> bool:
        """Whether this node should make do with one connection fewer."""
        return self._num_of[node] > 1 and len(self._connections) > CROWD

    def _ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        """Closes here and not in the task, which may be cancelled before it has begun."""
        node = self._connections.pop(task)
        self._num_of[node] -= 1
        if not self._num_of[node]:
            del self._num_of[node]
        sock.close()

    async def _serve(self, sock: socket.socket, first: Request) -> None:
        """Answers one peer until it goes, says something wrong or falls silent."""
        request, loop = first, asyncio.get_running_loop()
        with contextlib.suppress(OSError, EOFError, ProtocolError, TimeoutError):
            _notice_the_dead(sock)
            while request.node == first.node and self._admits(request):
                if self._is_spare(first.node):
                    await loop.sock_sendall(sock, BUSY)
                    return
                if request.what == ASK_HAVE:
                    await self._tell(sock, request)
                else:
                    await self._answer(sock, request)
                async with asyncio.timeout(IDLE_LIMIT_S):
                    request = await _next_request(sock)

    async def _answer(self, sock: socket.socket, request: Request) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        held = self._find(request)
        if held is None or not held.is_proved(request):
            await loop.sock_sendall(sock, MISSING)
            return
        assert task is not None
        held.acquire()
        self._sending[task] = held
        turns = self._shared_turns if request.what == ASK_SHARED else self._turns
        try:
            async with turns.acquire(lambda: loop.sock_sendall(sock, QUEUED)) as turn:
                await loop.sock_sendall(sock, DATA)
                file = held.descriptor(request)
                await self._sender.send(sock, file, request.offset, request.size, turn)
        finally:
            del self._sending[task]
            held.release()

    async def _tell(self, sock: socket.socket, request: Request) -> None:
        """What there is of a thing, and what changes, until all of it is there. Raises EOFError
        when it is held no more, or the peer has gone."""
        loop = asyncio.get_running_loop()
        while (held := self._find(request)) is None:
            await loop.sock_sendall(sock, QUEUED)
            await _either(self._changed, SIGN_S)
        if not held.has(request):
            raise EOFError
        if held.is_complete:
            await loop.sock_sendall(sock, ALL)
            return
        bitmap, position = held.state()
        await loop.sock_sendall(sock, PART + bitmap)
        while held.retired is None:
            news, is_complete, changed = held.news(position), held.is_complete, held.changed
            await loop.sock_sendall(sock, news or RECORD.pack(QUEUED, 0))
            position += len(news)
            if is_complete:
                return
            await _either(changed, SIGN_S)
        raise EOFError


async def _either(event: asyncio.Event, limit_s: float) -> None:
    """Until it is set, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


async def _listen(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = (
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setblocking(False)
        # as that of a trainer that died
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as e:
        if listener is not None:
            listener.close()
        where = join_address(host, port) if port else host
        raise WeightsError(f"cannot serve weights on {where}: {e.strerror or e}") from e
    return listener


def _notice_the_dead(sock: socket.socket) -> None:
    """A peer that vanished while it was queued would be told so for a quarter of an hour."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IDLE_LIMIT_S * 1000))


async def _next_request(sock: socket.socket) -> Request:
    """Raises EOFError if the peer has gone, ProtocolError if it asks for something else."""
    loop = asyncio.get_running_loop()
    data = b""
    while missing := num_missing(data):
        part = await loop.sock_recv(sock, missing)
        if not part:
            raise EOFError
        data += part
    return unpack(data)
