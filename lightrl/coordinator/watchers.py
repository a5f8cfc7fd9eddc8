"""Who looks at the run, and how often. Sends snapshots; knows nothing of what is in them.

A watcher renews its Watch every few seconds. One that does not is gone, or was stopped with its
connection open, where snapshots would only pile up.
"""

import asyncio
import time
from collections.abc import Callable

from lightrl.transport.router import Peer

MIN_PERIOD_S = 0.1  # between two snapshots to one watcher
LEASE_S = 10.0


class Watchers:
    def __init__(self, send: Callable[[Peer], bool]) -> None:
        """`send` sends a snapshot to a peer and says whether that is still connected."""
        self.peers: dict[Peer, None] = {}  # a set in the order they came; those of the end included
        self._send = send
        self._tasks: dict[Peer, asyncio.Task[None]] = {}

    def renew(self, peer: Peer, every_s: float, tasks: asyncio.TaskGroup) -> None:
        """A snapshot now, and every `every_s` seconds until the lease runs out; 0 = just this
        one."""
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
