"""The processes at the other end of the router: which of them speaks for which node, and what is
said to each.

Owns the names: who may take one, who has it, who cannot be reached under it. What is said is
decided by the core; what is heard is dealt with in inbound.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from lightrl.coordinator.descriptors import Descriptors
from lightrl.core.fleet import Fleet
from lightrl.errors import PeerUnreachable
from lightrl.keys import Access
from lightrl.messages.message import Message
from lightrl.messages.nodes import TAKEN, Heartbeat, Hello, Welcome
from lightrl.transport.router import Peer, Router
from lightrl.transport.validate import why_unwelcome


@dataclass(eq=False)
class Peers:
    """`head` is the name of the coordinator's own node; `lost` is called with a node of the
    fleet that no connected peer represents."""

    _router: Router
    _fleet: Fleet
    _descriptors: Descriptors
    _head: str
    _run: str
    _warn: Callable[[str], None]
    _lost: Callable[[str], None]
    # by node
    _speakers: dict[str, Peer] = field(default_factory=dict, init=False)

    def speaker(self, node: str) -> Peer | None:
        return self._speakers.get(node)

    def speaks(self, peer: Peer) -> bool:
        """Whether it does for the node that it names."""
        return self._speakers.get(peer.name) == peer

    def let_speak(self, peer: Peer) -> Peer | None:
        """From now on it speaks for its node. Returns who did before."""
        before = self._speakers.get(peer.name)
        self._speakers[peer.name] = peer
        return before

    def restore(self, node: str, before: Peer | None) -> None:
        """Takes back what `let_speak` did: nobody speaks for the node if nobody did before."""
        if before is not None:
            self._speakers[node] = before
        else:
            del self._speakers[node]

    def send(self, node: str, message: Message) -> None:
        """To a node; one that cannot be reached is lost, once all is heard that it has said
        before."""
        peer = self._speakers.get(node)
        if peer is None:
            if node in self._fleet.nodes:
                self._lost(node)
        elif not self.tell(peer, message):
            self._router.drain(peer)

    def tell(self, peer: Peer, message: Message) -> bool:
        """Whether there is such a peer."""
        try:
            self._router.send(peer, message)
        except PeerUnreachable:
            return False
        return True

    def refuses(self, peer: Peer, hello: Hello) -> bool:
        """Whether this process may not speak for the node of its hello; it is told why."""
        refusal = self._refusal(peer, hello)
        if refusal is not None:
            self.tell(peer, refusal)
        return refusal is not None

    def _refusal(self, peer: Peer, hello: Hello) -> Welcome | None:
        if peer.access is not Access.FULL:
            if (why := why_unwelcome(self._head, hello)) is not None:
                self._warn(f"{hello.node} refused: {why}")
                return Welcome(run="", refused=why)
            if self._is_taken(peer):
                return Welcome(self._run, refused=TAKEN)
        if (why := self._why_no_room(peer, hello)) is not None:
            return Welcome(run="", refused=why)
        return None

    def _why_no_room(self, peer: Peer, hello: Hello) -> str | None:
        """In one line; None for whoever can be taken in, as a process that was once is."""
        is_new = hello.roles == ("rollout",) and not self.speaks(peer)
        return self._descriptors.why_no_room() if is_new else None

    def _is_taken(self, peer: Peer) -> bool:
        """Whether another process speaks under this name and lives, as far as is known.

        Only with the full key one takes over from it: who may join could else end any node. A
        daemon that was started again gets its name when the connection of the one before is gone,
        or its lease is over.
        """
        before = self._speakers.get(peer.name)
        if before in {None, peer} or peer.name not in self._fleet.nodes:
            return False
        self.send(peer.name, Heartbeat())  # one that has gone is found out, and its name free soon
        return True
