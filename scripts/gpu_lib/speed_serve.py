"""From weights on the trainer's GPU to an engine that serves them: write, pull over loopback, load.

A version is written to /dev/shm as a rank does, pulled from a WeightServer over TCP as a node on
another machine does (one on the same machine reads the file), and loaded by an engine process. Goal
for 3B on one machine: below 1 s.

    python -m gpu_lib.speed_serve 3b
"""

import asyncio
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_lib.notes import figure
from gpu_lib.shapes import make_config, make_module, on_device, shape_for
from gpu_lib.speed_engine import memory_folder

REPEAT = 3


def main() -> None:
    shape = shape_for(sys.argv[1])
    import torch

    with tempfile.TemporaryDirectory(prefix="lightrl-gpu-", dir=memory_folder()) as scratch:
        folder = Path(scratch)
        model = make_config(folder / "model", shape)
        module = make_module(model, on_device(), torch.bfloat16)
        asyncio.run(measure(shape, module, model, folder))


async def measure(shape: str, module: Any, model: Path, folder: Path) -> None:
    from lightrl.engine.base import (
        EngineFailed,
        EngineLoaded,
        EngineSpec,
        EngineStarted,
        LoadWeights,
    )
    from lightrl.engine.start import start_engine
    from lightrl.messages.weights import WeightsSource
    from lightrl.tickets import pull_ticket
    from lightrl.weights.pull.transfer import Pull
    from lightrl.weights.serve.server import WeightServer
    from lightrl.weights.version.tensors import write_tensors

    has_vllm = on_device() == "cuda" and importlib.util.find_spec("vllm") is not None
    kind: Any = "vllm" if has_vllm else "torch"
    args: dict[str, Any] = {"gpu_memory_utilization": 0.4} if has_vllm else {}
    spec = EngineSpec(kind, str(model), "bfloat16", 256, 8, engine_args=args)
    engine = await start_engine(spec, threads=4, log=folder / "engine.log")
    server = WeightServer()
    best: dict[str, float] = {}
    try:
        started = await engine.receive()
        assert isinstance(started, EngineStarted), started
        addresses = await server.start("127.0.0.1")
        for version in range(1, REPEAT + 1):
            path, copy = folder / f"v{version}.bin", folder / f"pulled-{version}.bin"
            begun = time.perf_counter()
            file = write_tensors(path, version, module.named_parameters())
            written = time.perf_counter()
            server.serve(file)
            pull = Pull(wanted(file), "node", copy)
            ticket = pull_ticket(server.secret, "node", version)
            pull.add_sources([WeightsSource("trainer", addresses, ticket)])
            await pull.run()
            pulled = time.perf_counter()
            engine.send(LoadWeights(pull.file))
            while not isinstance(event := await engine.receive(), EngineLoaded):
                assert not isinstance(event, EngineFailed), event
            loaded = time.perf_counter()
            found = {
                "write (from the GPU, digested)": written - begun,
                "pull over loopback": pulled - written,
                f"load by the {kind} engine": loaded - pulled,
                "published to served": loaded - written,
            }
            best = {name: min(s, best.get(name, s)) for name, s in found.items()}
            await server.retire(file.digest)
            path.unlink()
            copy.unlink()
        figure(f"{shape}: size of a version, GB", round(file.num_bytes / 1e9, 3))
    finally:
        await server.close()
        await engine.stop()
    for name, seconds in best.items():
        figure(f"{shape}: {name}, s, best of {REPEAT}", round(seconds, 3))


def wanted(file: Any) -> Any:
    from lightrl.weights.pull.connection import Wanted

    manifest_bytes = file.manifest_bytes()
    return Wanted(file.policy_version, file.digest, file.num_bytes, manifest_bytes)


if __name__ == "__main__":
    main()
