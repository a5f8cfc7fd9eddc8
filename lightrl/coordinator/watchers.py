"""Send snapshots of the run to watchers, such as `lightrl top`.

A watcher renews its Watch every few seconds; without it, snapshots would queue up for a stopped
watcher.
"""

import asyncio
import time
from collections.abc import Callable

from lightrl.transport.router import Peer

MIN_PERIOD_S = 0.1  # between two snapshots to one watcher
LEASE_S = 10.0


class Watchers:
    """The watchers of a run, each with a task."""

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
