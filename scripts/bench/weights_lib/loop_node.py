"""A daemon's part in weights, and by how much its event loop is late: `loop_node trainer|puller|
idle`. Speaks JSON lines; each answer has the worst lateness since the one before.

The trainer serves what {"publish": VersionFile} names, as `trainer/served.py` does, and gives up
and removes what {"forget": VersionFile} does. The puller gets what {"offer": VersionFile,
"addresses": ..., "secret": ...} names, as `rollout/weights.py` does: pulled, proved, and the one
before retired, closed and unlinked. Both end with their input, and then remove what they have.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from lightrl.config.sections import Weights
from lightrl.messages.weights import PublishWeights, WeightsFailed, WeightsSource
from lightrl.rollout.weights import Callbacks, NodeWeights
from lightrl.system.threads import in_thread
from lightrl.tickets import pull_ticket
from lightrl.trainer.protocol import Published
from lightrl.trainer.served import ServedVersions
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile

TICK_S = 0.005
NAME, HOST = "puller", "127.0.0.1"


class Ticker:
    """Lives in the loop that it watches."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._task = asyncio.create_task(self._tick())

    def worst_ms(self) -> float:
        """Since it was asked last."""
        worst, self._worst_s = self._worst_s, 0.0
        return 1000 * worst

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._worst_s = max(self._worst_s, time.monotonic() - due)


class Idle:
    """What the machine itself does to a loop."""

    def about(self) -> dict[str, Any]:
        return {}

    async def do(self, order: dict[str, Any]) -> None:
        pass

    async def close(self) -> None:
        pass


class Trainer(Idle):
    def __init__(self) -> None:
        self._server = WeightServer()
        self._versions = ServedVersions(self._server)

    async def start(self) -> None:
        await self._server.start(HOST)

    def about(self) -> dict[str, Any]:
        return {"addresses": self._server.addresses, "secret": self._server.secret}

    async def do(self, order: dict[str, Any]) -> None:
        if "publish" in order:
            await self._versions.serve(Published(VersionFile(**order["publish"])))
        else:
            file = VersionFile(**order["forget"])
            await self._versions.make_room()
            await in_thread(Path(file.path).unlink)

    async def close(self) -> None:
        await self._versions.close()
        await self._server.close()


class Puller(Idle):
    def __init__(self) -> None:
        self._store, self._server = Store(b"bench"), WeightServer()
        self._weights = NodeWeights(
            NAME,
            Weights(),
            self._store,
            self._server,
            HOST,
            Callbacks(self._receive, lambda: None, lambda *_: None),
        )
        self._running = asyncio.create_task(self._weights.run())

    async def start(self) -> None:
        await self._server.start(HOST)
        await in_thread(self._store.open)

    async def do(self, order: dict[str, Any]) -> None:
        file = VersionFile(**order["offer"])
        ticket = pull_ticket(order["secret"], NAME, file.policy_version)
        source = WeightsSource("trainer", tuple(order["addresses"]), ticket)
        size = await asyncio.to_thread(os.path.getsize, file.manifest_path)
        offer = PublishWeights(file.policy_version, file.digest, file.num_bytes, size, (source,))
        self._weights.offer(offer)
        await self._weights.next()
        await asyncio.gather(*self._weights._chores)  # what was before goes

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._weights.close()
        await self._server.close()
        await in_thread(self._store.close)

    def _receive(self, message: object) -> None:
        if isinstance(message, WeightsFailed):
            print(message.reason, file=sys.stderr, flush=True)


KINDS = {"trainer": Trainer, "puller": Puller, "idle": Idle}


@asynccontextmanager
async def node(kind: str) -> AsyncIterator[Idle]:
    one = KINDS[kind]()
    if isinstance(one, Trainer | Puller):
        await one.start()
    try:
        yield one
    finally:
        await one.close()


async def main(kind: str) -> None:
    loop, ticker = asyncio.get_running_loop(), Ticker()
    async with node(kind) as one:
        await asyncio.sleep(0.1)
        ticker.worst_ms()  # of the start
        print(json.dumps(one.about()), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await one.do(json.loads(line))
            print(json.dumps({"late_ms": ticker.worst_ms()}), flush=True)
    print(json.dumps({"late_ms": ticker.worst_ms()}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
