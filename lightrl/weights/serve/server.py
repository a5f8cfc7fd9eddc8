"""The holder's side of a weight pull: serves the versions of one node, over TCP, to nodes with a
ticket.

Owns what is held and all connections. Must not import torch. Which versions exist and which nodes
may have them is decided elsewhere; the protocol is in `request.py`.

A ticket is for one node and one version of one holder (lightrl/tickets.py). A waiting node costs a
descriptor and nothing else.
"""

import asyncio
import contextlib
import hmac
import resource
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from lightrl.errors import ProtocolError, WeightsError
from lightrl.system.addresses import join_address
from lightrl.system.threads import cancel
from lightrl.tickets import pull_ticket
from lightrl.weights.serve.held import Held
from lightrl.weights.serve.request import (
    ALL,
    ASK_HAVE,
    ASK_SHARED,
    BUSY,
    DATA,
    MISSING,
    PART,
    QUEUED,
    SIGN_S,
    Request,
    num_missing,
    unpack,
)
from lightrl.weights.serve.send import IDLE_LIMIT_S, FileSender
from lightrl.weights.version.manifest import VersionFile

MAX_CONNECTIONS = 4096  # with a ticket; fewer where this process may not open as many files
MAX_STRANGERS = 512  # connections without a ticket, likewise; then the oldest is closed
GREETING_S = 2.0  # from the connection to a whole request
PAUSE_S = 0.01  # when nothing can be accepted, for lack of descriptors
MAX_OF_A_NODE = 16  # connections
MAX_HELD = 64  # versions and deltas
BACKLOG = 4096  # nodes that wait to be accepted; the kernel may allow fewer
RETIRE_S = 2.0


class WeightServer:
    """Serves versions to nodes with a ticket. `await start(hosts)` once, `await close()` at the
    end.

    One for each daemon. A delta is published like a version. While a file is served, the server has
    a shared `flock` on it.
    """

    def __init__(
        self, max_connections: int = MAX_CONNECTIONS, max_bytes_per_s: float | None = None
    ) -> None:
        """`max_bytes_per_s`: what all nodes together get, None = what the line can take."""
        self._secret = secrets.token_hex(16)
        self._addresses: tuple[str, ...] = ()
        self._held: dict[bytes, Held] = {}  # by digest
        self._changed = asyncio.Event()  # of what is held; replaced after each change
        self._max_connections = max_connections
        self._sender = FileSender(max_bytes_per_s)
        self._acceptor: Acceptor | None = None
        self._num_of = Counter[bytes]()  # connections of each node, with a ticket
        self._sending: dict[asyncio.Task[None], Held] = {}

    @property
    def secret(self) -> str:
        """The secret of tickets (tickets.pull_ticket); new in every process."""
        return self._secret

    @property
    def addresses(self) -> tuple[str, ...]:
        """ "host:port" of each host listened on, for WeightsEndpoint."""
        return self._addresses

    async def start(self, hosts: str | Sequence[str], port: int = 0) -> tuple[str, ...]:
        """Listen on `port` of each of `hosts`, 0 = any, and return `addresses`. Raises
        WeightsError."""
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
        most = min(MAX_STRANGERS, limit // 4)
        self._acceptor = Acceptor(tuple(listeners.values()), most, self._serve)
        ports = ((host, sock.getsockname()[1]) for host, sock in listeners.items())
        self._addresses = tuple(join_address(host, port) for host, port in ports)
        return self._addresses

    def publish(self, file: VersionFile) -> None:
        """Serve the version in `file`, which is complete and verified; the file may be unlinked.

        The same digest under another policy_version adds that version's tickets. Opens two files,
        reads nothing. Raises WeightsError if the file is missing, has another size or is being
        overwritten, or if MAX_HELD are served.
        """
        self._hold(file, is_complete=True)

    def serve_partial(self, file: VersionFile) -> Held:
        """Serve the verified buckets of a file (of full size, at `file.path`) that is being pulled;
        its manifest is there."""
        return self._hold(file, is_complete=False)

    def retire(self, digest: str, grace_s: float = RETIRE_S) -> asyncio.Future[None]:
        """Stop serving a version; one that is not served is retired already.

        The future is done when the file is closed, in a thread: requests in progress have `grace_s`
        to end, then are cut.
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
        """Stop serving; transfers in progress are cut."""
        if self._acceptor is not None:
            await self._acceptor.close()
            self._acceptor = None
        await asyncio.gather(*(self.retire(digest.hex()) for digest in list(self._held)))

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

    def _admits(self, request: Request) -> bool:
        """Return whether the ticket is right and, if the version is held, it has such a range."""
        node = request.node.decode(errors="replace")
        expected = pull_ticket(self._secret, node, request.policy_version).encode()
        held = self._find(request)
        return hmac.compare_digest(request.ticket, expected) and (held is None or held.has(request))

    def _find(self, request: Request) -> Held | None:
        """The version that is asked for, if the ticket is for it."""
        held = self._held.get(request.digest)
        return held if held is not None and request.policy_version in held.policy_versions else None

    async def _serve(self, sock: socket.socket, first: Request) -> None:
        """Answer one node until it closes the connection, sends a wrong request or falls silent."""
        node = first.node
        if not self._admits(first):
            return
        if self._num_of[node] >= MAX_OF_A_NODE or self._num_of.total() >= self._max_connections:
            sock.send(BUSY)
            return
        self._num_of[node] += 1
        try:
            _notice_the_dead(sock)
            request = first
            while request.node == node and self._admits(request):
                if request.what == ASK_HAVE:
                    await self._report(sock, request)
                else:
                    await self._answer(sock, request)
                async with asyncio.timeout(IDLE_LIMIT_S):
                    request = await _next_request(sock)
        finally:
            self._num_of[node] -= 1
            if not self._num_of[node]:
                del self._num_of[node]

    async def _answer(self, sock: socket.socket, request: Request) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        held = self._find(request)
        if held is None or not held.can_send(request):
            await loop.sock_sendall(sock, MISSING)
            return
        assert task is not None
        held.acquire()
        self._sending[task] = held
        is_shared = request.what == ASK_SHARED
        try:
            async with self._sender.turn(sock) if is_shared else contextlib.nullcontext():
                await loop.sock_sendall(sock, DATA)
                file = held.descriptor(request)
                await self._sender.send(sock, file, request.offset, request.size)
        finally:
            del self._sending[task]
            held.release()

    async def _report(self, sock: socket.socket, request: Request) -> None:
        """Send which buckets of a version are here, once that differs from what the node has seen.
        Raises EOFError when the version is retired."""
        loop = asyncio.get_running_loop()
        while (held := self._find(request)) is None:
            await loop.sock_sendall(sock, QUEUED)
            await _wait(self._changed, SIGN_S)
        if not held.has(request):
            raise EOFError
        if not held.is_complete and held.holdings.changes == request.offset:
            await _wait(held.changed, SIGN_S)
        if held.retired is not None:
            raise EOFError
        here = ALL if held.is_complete else PART + held.holdings.pack(held.size)
        await loop.sock_sendall(sock, here)


class Acceptor:
    """Accepts connections, and reads the first request of each, which must come within GREETING_S.

    Of more than `most` that have sent none yet, the oldest is closed: a node with a ticket sends
    its request together with the connection.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        most: int,
        serve: Callable[[socket.socket, Request], Awaitable[None]],
    ) -> None:
        self._listeners = listeners
        self._serve = serve
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}  # without a request, the oldest first
        self._loop = asyncio.get_running_loop()
        for listener in listeners:
            self._loop.add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Close the listeners and all connections."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        await cancel(*self._tasks)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the node has gone, or no descriptor is free
            self._loop.remove_reader(listener)
            self._loop.call_later(PAUSE_S, self._accept_again, listener)
            return
        sock.setblocking(False)
        if len(self._silent) >= self._most:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._handle(sock))
        self._tasks.add(task)
        self._silent[task] = None
        task.add_done_callback(lambda task: self._end(task, sock))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # not closed
            self._loop.add_reader(listener, self._accept, listener)

    async def _handle(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ProtocolError, TimeoutError):
            async with asyncio.timeout(GREETING_S):
                request = await _next_request(sock)
            if (task := asyncio.current_task()) is not None:
                self._silent.pop(task, None)
            await self._serve(sock, request)

    def _end(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        """Close a connection outside its task, which may be cancelled before it begins."""
        self._tasks.discard(task)
        self._silent.pop(task, None)
        sock.close()


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    """Wait until the event is set, but no longer than this."""
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
        # the port of a trainer that died
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
    """A node that vanished while it was queued would stay connected for a quarter of an hour."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IDLE_LIMIT_S * 1000))


async def _next_request(sock: socket.socket) -> Request:
    """Raises EOFError if the node has gone, ProtocolError for what is no request."""
    loop = asyncio.get_running_loop()
    data = b""
    while missing := num_missing(data):
        part = await loop.sock_recv(sock, missing)
        if not part:
            raise EOFError
        data += part
    return unpack(data)
