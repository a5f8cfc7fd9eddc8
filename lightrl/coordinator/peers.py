"""Bind node names to connected processes, send messages to them, and snapshots to watchers.

Decides which process may have a name, and reports nodes that cannot be reached.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightrl.coordinator.descriptors import Descriptors
from lightrl.core.nodes.fleet import Fleet
from lightrl.errors import PeerUnreachable
from lightrl.keys import Access, access_for
from lightrl.messages.message import Message
from lightrl.messages.nodes import TAKEN, Heartbeat, Hello, Welcome
from lightrl.transport.router import Peer, Router
from lightrl.transport.validate import why_unwelcome

MIN_PERIOD_S = 0.1  # between two snapshots to one watcher
LEASE_S = 10.0  # of a watcher


@dataclass(eq=False)
class Peers:
    """Binds names of nodes to processes, and sends to them. `head`: the coordinator's own node;
    `lost` is called with a node of the fleet that has no connected process."""

    _router: Router
    _fleet: Fleet
    _descriptors: Descriptors
    _head: str
    _run: str
    _warn: Callable[[str], None]
    _lost: Callable[[str], None]
    # by node
    _bound: dict[str, Peer] = field(default_factory=dict, init=False)

    def of_node(self, node: str) -> Peer | None:
        return self._bound.get(node)

    def is_current(self, peer: Peer) -> bool:
        """Return whether the name of its node is bound to this process."""
        return self._bound.get(peer.name) == peer

    def bind(self, peer: Peer) -> Peer | None:
        """Bind a name to this process, and return the process that had it."""
        before = self._bound.get(peer.name)
        self._bound[peer.name] = peer
        return before

    def restore(self, node: str, before: Peer | None) -> None:
        """Undo `bind`."""
        if before is not None:
            self._bound[node] = before
        else:
            del self._bound[node]

    def send(self, node: str, message: Message) -> None:
        """Send to a node; an unreachable one is lost once its last messages are received."""
        peer = self._bound.get(node)
        if peer is None:
            if node in self._fleet.nodes:
                self._lost(node)
        elif not self.send_to(peer, message):
            self._router.drain(peer)

    def send_to(self, peer: Peer, message: Message) -> bool:
        """Send to a process, and return whether it is connected."""
        try:
            self._router.send(peer, message)
        except PeerUnreachable:
            return False
        return True

    def refuses(self, peer: Peer, hello: Hello) -> bool:
        """Return whether this Hello is refused; the process receives the reason."""
        refusal = self._refusal(peer, hello)
        if refusal is not None:
            self.send_to(peer, refusal)
        return refusal is not None

    def _refusal(self, peer: Peer, hello: Hello) -> Welcome | None:
        if peer.access is not Access.FULL:
            if (why := why_unwelcome(self._head, hello, peer.access)) is not None:
                self._warn(f"{hello.node} refused: {why}")
                return Welcome(run="", refused=why)
            if self._is_taken(peer):
                return Welcome(self._run, refused=TAKEN)
        if (why := self._why_no_room(peer, hello)) is not None:
            return Welcome(run="", refused=why)
        return None

    def _why_no_room(self, peer: Peer, hello: Hello) -> str | None:
        """Return one line, or None; a process that was admitted once is admitted again."""
        may_wait = access_for(hello.roles) is not Access.FULL
        is_new = may_wait and not self.is_current(peer)
        return self._descriptors.why_no_room(len(self._fleet.nodes)) if is_new else None

    def _is_taken(self, peer: Peer) -> bool:
        """Return whether another process has this name, and its node is not lost.

        Only the full key permits to take a name over: with another key a process could else end
        any node. A restarted daemon gets its name once the earlier connection is closed or its
        lease has expired.
        """
        before = self._bound.get(peer.name)
        if before in {None, peer} or peer.name not in self._fleet.nodes:
            return False
        self.send(peer.name, Heartbeat())  # fails soon if that process has ended
        return True


class Watchers:
    """Send snapshots of the run to watchers, such as `lightrl top`, each from a task.

    A watcher renews its Watch every few seconds; without it, snapshots would queue up for a stopped
    watcher.
    """

    def __init__(self, send: Callable[[Peer], bool]) -> None:
        """`send` sends a snapshot to a peer, and returns whether it is connected."""
        self.peers: dict[Peer, None] = {}  # an ordered set
        self._send = send
        self._tasks: dict[Peer, asyncio.Task[None]] = {}

    def renew(self, peer: Peer, every_s: float, tasks: asyncio.TaskGroup) -> None:
        """Send a snapshot now and every `every_s` seconds until the lease expires; 0 = only now."""
        previous = self._tasks.pop(peer, None)
        if previous is not None:
            previous.cancel()
        if self._send(peer) and every_s > 0:
            self.peers[peer] = None
            self._tasks[peer] = tasks.create_task(self._serve(peer, max(every_s, MIN_PERIOD_S)))

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _serve(self, peer: Peer, every_s: float) -> None:
        until = time.monotonic() + LEASE_S + every_s
        while time.monotonic() < until:
            await asyncio.sleep(every_s)
            if not self._send(peer):
                break
        del self._tasks[peer]
        self.peers.pop(peer, None)
