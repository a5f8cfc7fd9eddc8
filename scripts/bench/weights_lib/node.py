"""One node of the benchmark, a process: `python -m scripts.bench.weights_lib.node NAME HOST`.

Speaks JSON lines. At its start it prints its addresses and its secret; then it carries out
orders: {"publish": VersionFile}, or {"pull": Wanted, "to": path, "sources": [...], "streams": 4},
which is answered by lines of progress and one with the stats. Ends with its input.
"""

import asyncio
import json
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from lightrl.messages.weights import WeightsProgress, WeightsSource
from lightrl.weights.pull.connection import Wanted
from lightrl.weights.pull.transfer import Pull, PullLimits
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile


def report(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def pull(name: str, server: WeightServer, order: dict[str, Any]) -> None:
    progress: list[WeightsProgress] = []

    def note(now: WeightsProgress) -> None:
        if not progress or progress[-1].num_bytes != now.num_bytes:
            report(proved=now.num_bytes)
        progress.append(now)

    one = Pull(
        Wanted(**order["pull"]), name, Path(order["to"]), server=server,
        limits=PullLimits(order["streams"]), on_progress=note,
    )  # fmt: skip
    one.add_sources(
        [WeightsSource(s["node"], tuple(s["addresses"]), s["ticket"]) for s in order["sources"]]
    )
    begun, used = time.monotonic(), cpu_s()
    stats = await one.run()
    report(stats=asdict(stats), wall_s=time.monotonic() - begun, cpu_s=cpu_s() - used)


async def main(name: str, host: str) -> None:
    server, loop, tasks = WeightServer(), asyncio.get_running_loop(), set[asyncio.Task[None]]()
    report(addresses=await server.start(host), secret=server.secret)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if "publish" in order:
            server.serve(VersionFile(**order["publish"]))
            report(published=True)
        elif "retire" in order:
            await server.retire(order["retire"])
            report(retired=True)
        else:
            tasks.add(loop.create_task(pull(name, server, order)))
    await server.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
