"""What peers say, on its way to the core: messages in, events out.

Owns the order in which it is heard and what is no business of the core: who looks on, who says
hello, checkpoints. Who may say what is decided in transport/validate.py and in peers.py.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from lightrl.coordinator.history_sync import Histories
from lightrl.coordinator.journaling import Journaling
from lightrl.coordinator.peers import Peers
from lightrl.coordinator.replays import Replays
from lightrl.coordinator.watchers import Watchers
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import CheckpointWritten, DrainRequested, Event, NodeJoined, NodeLost
from lightrl.errors import PeerUnreachable, ProtocolError
from lightrl.messages.message import Message
from lightrl.messages.nodes import REJOIN, Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.snapshot import Watch
from lightrl.messages.trainers import TrainerRelay
from lightrl.messages.training import Checkpointed, ShardsTaken
from lightrl.metrics.rounds import Records
from lightrl.transport.router import Peer, Router
from lightrl.transport.validate import as_event

MAX_TURN_S = 0.05  # of messages that are dealt with before other tasks get their turn


class Inbound:
    def __init__(
        self,
        run: str,
        router: Router,
        core: Coordinator,
        peers: Peers,
        watchers: Watchers,
        histories: Histories,
        replays: Replays,
        journaling: Journaling,
        records: Records,
        feed: Callable[[Event], None],
    ) -> None:
        self._hello_again = Welcome(run, refused=REJOIN)
        self._router = router
        self._core = core
        self._peers = peers
        self._watchers = watchers
        self._histories = histories
        self._replays = replays
        self._journaling = journaling
        self._records = records
        self._feed = feed

    async def receive(self, tasks: asyncio.TaskGroup) -> None:
        """Until cancelled. Watchers are served in `tasks`."""
        while True:
            turn_ends = time.monotonic() + MAX_TURN_S
            for peer, message in await self._router.receive():
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + MAX_TURN_S
                if isinstance(message, Watch):
                    self._watchers.renew(peer, message.every_s, tasks)
                elif isinstance(message, Hello) and message.node == peer.name:
                    self._greet(peer, message)
                elif isinstance(message, Drain) and message.node != peer.name:
                    self._feed(DrainRequested(message.node, message.reason))
                elif isinstance(message, PeerUnreachable):
                    if self._peers.speaks(peer):
                        self._feed(NodeLost(peer.name, "connection lost"))
                elif self._peers.speaks(peer):
                    self._handle(peer, message)
                elif isinstance(message, Heartbeat):  # given up while it was silent, or taken over
                    self._peers.tell(peer, self._hello_again)
                elif isinstance(message, ProtocolError):
                    self._records.bad_frames += 1

    def _greet(self, peer: Peer, hello: Hello) -> None:
        """The process that says hello speaks for its node from now on, if it may and the core
        agrees."""
        if self._peers.refuses(peer, hello):
            return
        if "trainer" in hello.roles and self._core.fleet.trainer in {None, hello.node}:
            self._replays.cancel()  # what it needs again is asked for when it says where it stands
        before = self._peers.let_speak(peer)
        self._histories.heard(peer.identity, hello)
        self._feed(NodeJoined(hello))
        known = self._core.fleet.nodes.get(hello.node)
        if known is None or known.incarnation != hello.incarnation:
            self._peers.restore(hello.node, before)

    def _handle(self, peer: Peer, message: Message | ProtocolError) -> None:
        node = peer.name
        if isinstance(message, Heartbeat) and node not in self._core.fleet.nodes:
            self._peers.send(node, self._hello_again)
        elif isinstance(message, Checkpointed):
            trained_step = self._core.trainer_feed.trained_step
            if (
                node == self._core.fleet.trainer
                and trained_step is not None
                and message.step <= trained_step
            ):
                self._journaling.drop_before(message.oldest)
                self._feed(CheckpointWritten(message.step))
        elif isinstance(message, TrainerRelay):
            if self._core.fleet.trainers.may_relay(node, message.node):
                self._peers.send(message.node, replace(message, node=node))
        else:
            event = as_event(node, message)
            if isinstance(event, NodeLost):
                self._records.bad_frames += 1
            else:
                self._histories.heard(peer.identity, message)
                self._records.speculation.heard(peer.identity, message)
                self._records.weights.heard(self._core.fleet, node, message)
            if isinstance(message, ShardsTaken):
                self._replays.on_shards_taken(message)
            self._feed(event)
            if isinstance(message, Bye) and self._peers.speaks(peer):
                self._peers.restore(node, None)
