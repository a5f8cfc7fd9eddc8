"""Play an episode of an adapter twice, in an interpreter without LightRL's dependencies.

    PYTHON play.py PACKAGE_DIR < {"source", "args", "row", "seed", "turns"}

Prints a line of JSON: {"failed": text}, or {"episodes": [[observation, ...], [...]]}. Another
episode with another seed is played between the turns of the second, as in a worker process.
"""

import asyncio
import dataclasses
import importlib
import inspect
import json
import sys
import types


async def played(make, task, is_disturbed):
    episodes = [make(), make()] if is_disturbed else [make()]
    observations = []
    for turn in [None, *task["turns"]]:
        for k, episode in enumerate(episodes):
            if turn is None:
                called = episode.reset(task["row"], task["seed"] + k)
            else:
                called = episode.end(turn["cut"]) if "cut" in turn else episode.step(turn)
            observed = await called if inspect.isawaitable(called) else called
            if k == 0:
                observations.append(dataclasses.asdict(observed))
        if observations[-1]["done"]:
            break
    for episode in episodes:
        if inspect.isawaitable(closed := episode.close()):
            await closed
    return observations


def main():
    package = types.ModuleType("lightrl")
    package.__path__ = [sys.argv[1]]
    sys.modules["lightrl"] = package
    base = importlib.import_module("lightrl.environments.worker.base")
    load = importlib.import_module("lightrl.environments.worker.load")
    task = json.load(sys.stdin)
    try:
        make = load.load_source(task["source"], task["args"])
        return {"episodes": [asyncio.run(played(make, task, each)) for each in (False, True)]}
    except (base.UserError, RuntimeError, ValueError) as e:
        return {"failed": str(e)}


if __name__ == "__main__":
    print(f"\n{json.dumps(main())}")
