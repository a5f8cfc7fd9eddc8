"""Receive messages of peers, and convert them to events of the core.

Handles messages that do not concern the core: Watch, Hello, checkpoints, relays between trainer
nodes. transport/validate.py and peers.py decide which peer may send what.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightrl.coordinator.history_sync import Histories
from lightrl.coordinator.journaling import Journaling
from lightrl.coordinator.peers import Peers, Watchers
from lightrl.coordinator.replays import Replays
from lightrl.core import events
from lightrl.core.coordinator import Coordinator
from lightrl.errors import PeerUnreachable, ProtocolError
from lightrl.messages.message import Message
from lightrl.messages.nodes import REJOIN, Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.snapshot import Watch
from lightrl.messages.trainers import TrainerRelay
from lightrl.messages.training import Checkpointed, ShardsTaken
from lightrl.metrics.rounds import Records
from lightrl.transport.router import Peer, Router

MAX_TURN_S = 0.05  # spent on messages before other tasks run


@dataclass(eq=False)
class Inbound:
    """Receives messages of the peers of `run`, and feeds them to the core as events."""

    _run: str
    _router: Router
    _core: Coordinator
    _peers: Peers
    _watchers: Watchers
    _histories: Histories
    _replays: Replays
    _journaling: Journaling
    _records: Records
    _feed: Callable[[events.Event], None]

    async def receive(self, tasks: asyncio.TaskGroup) -> None:
        """Receive until cancelled. Watchers are served in `tasks`."""
        while True:
            turn_ends = time.monotonic() + MAX_TURN_S
            for peer, message in await self._router.receive():
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + MAX_TURN_S
                if isinstance(message, Watch):
                    self._watchers.renew(peer, message.every_s, tasks)
                elif isinstance(message, Hello) and message.node == peer.name:
                    self._on_hello(peer, message)
                elif isinstance(message, Drain) and message.node != peer.name:
                    self._feed(events.DrainRequested(message.node, message.reason))
                elif isinstance(message, PeerUnreachable):
                    if self._peers.is_current(peer):
                        self._feed(events.NodeLost(peer.name, "connection lost"))
                elif self._peers.is_current(peer):
                    self._handle(peer, message)
                elif isinstance(message, Heartbeat):  # of a lost or replaced node
                    self._peers.send_to(peer, Welcome(self._run, refused=REJOIN))
                elif isinstance(message, ProtocolError):
                    self._records.bad_frames += 1

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        """Bind the node's name to this process, if it may have it and the core accepts it."""
        if self._peers.refuses(peer, hello):
            return
        if "trainer" in hello.roles and self._core.fleet.trainer in {None, hello.node}:
            self._replays.cancel()  # the core requests again what the trainer lacks
        before = self._peers.bind(peer)
        self._histories.received(peer.identity, hello)
        self._feed(events.NodeJoined(hello))
        known = self._core.fleet.nodes.get(hello.node)
        if known is None or known.incarnation != hello.incarnation:
            self._peers.restore(hello.node, before)

    def _handle(self, peer: Peer, message: Message | ProtocolError) -> None:
        """Feed the message of a node to the core as an event. Messages that do not concern the core
        are answered, relayed or ignored here."""
        node = peer.name
        if isinstance(message, Heartbeat) and node not in self._core.fleet.nodes:
            self._peers.send(node, Welcome(self._run, refused=REJOIN))
        elif isinstance(message, Checkpointed):
            trained_step = self._core.trainer_feed.trained_step
            if (
                node == self._core.fleet.trainer
                and trained_step is not None
                and message.step <= trained_step
            ):
                self._journaling.drop_before(message.oldest)
                self._feed(events.CheckpointWritten(message.step))
        elif isinstance(message, TrainerRelay):
            if self._core.fleet.trainers.may_relay(node, message.node):
                self._peers.send(message.node, replace(message, node=node))
        else:
            event = as_event(node, message)
            if isinstance(event, events.NodeLost):
                self._records.bad_frames += 1
            else:
                self._histories.received(peer.identity, message)
                self._records.speculation.received(peer.identity, message)
                self._records.weights.received(self._core.fleet, node, message)
            if isinstance(message, ShardsTaken):
                self._replays.on_shards_taken(message)
            self._feed(event)
            if isinstance(message, Bye) and self._peers.is_current(peer):
                self._peers.restore(node, None)


def as_event(peer: str, message: Message | ProtocolError) -> events.Event:
    """Return the event for the core of a node's message; a message that a node must not send
    removes the node."""
    match message:
        case Bye(reason, ok):
            return events.NodeLeft(peer, reason, ok)
        case Drain(_, reason):
            return events.NodeDraining(peer, reason)
        case ProtocolError():
            return events.NodeLost(peer, str(message)[:200])
        case _ if isinstance(message, events.NodeMessage):
            return events.MessageArrived(peer, message)
        case _:
            return events.NodeLost(peer, f"unexpected {type(message).__name__}")
