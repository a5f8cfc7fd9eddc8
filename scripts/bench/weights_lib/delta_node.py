"""A rollout node's weights without an engine, a process: `python -m
scripts.bench.weights_lib.delta_node NAME HOST FOLDER`.

Speaks JSON lines: {"offers": [[seconds, PublishWeights], ...]} are made so many seconds after the
first; answered when the version is here, proved: {"wall_s", "num_bytes", "delta_bytes"}. Ends with
its input.
"""

import asyncio
import json
import sys
import time
from typing import Any

import msgspec
import uvloop

from lightrl.config.sections import Weights
from lightrl.messages.message import Message
from lightrl.messages.weights import PublishWeights
from lightrl.rollout.weights import Callbacks, NodeWeights
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer


async def get(
    weights: NodeWeights, serves: list[tuple[int, str]], offers: list[list[Any]]
) -> dict[str, Any]:
    loop, begun = asyncio.get_running_loop(), time.monotonic()
    for seconds, offer in offers:
        message = msgspec.convert(offer, PublishWeights)
        loop.call_later(seconds, weights.offer, message) if seconds else weights.offer(message)
    fetched = await weights.next()
    serves[:] = [(fetched.file.policy_version, fetched.file.digest)]
    weights.loaded()
    wall_s = time.monotonic() - begun
    await asyncio.sleep(max(0.0, max(seconds for seconds, _ in offers) - wall_s) + 0.05)
    return {
        "wall_s": wall_s,
        "num_bytes": fetched.stats.num_bytes,
        "delta_bytes": fetched.delta_bytes,
    }


async def main(name: str, host: str, mark: str) -> None:
    server, loop = WeightServer(), asyncio.get_running_loop()
    store = Store(mark.encode())
    store.open()
    reported, serves = list[Message](), list[tuple[int, str]]()
    weights = NodeWeights(
        name,
        Weights(),
        store,
        server,
        host,
        Callbacks(reported.append, lambda: next(iter(serves), None), lambda *_: None),
    )
    await server.start(host)
    running = asyncio.create_task(weights.run())
    print(json.dumps({"ready": True}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await get(weights, serves, json.loads(line)["offers"])), flush=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await weights.close()
    await server.close()
    store.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
