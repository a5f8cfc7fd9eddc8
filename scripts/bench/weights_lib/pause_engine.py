"""An engine that loads versions, a process: `pause_engine make FOLDER MB DTYPE` writes a model and
two versions of it, `pause_engine measure FOLDER KIND DTYPE REPEAT` prints how long its loads took
beside bare ones into the same tensors, and by how much its own memory grew meanwhile.
"""

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightrl.engine.base import EngineSpec
from lightrl.engine.model_dir import build_model, read_config
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.tensors import write_tensors

EVERY_S = 0.005  # memory is looked at
SHAPE: dict[str, Any] = {  # layers of a model of 0.5B parameters, as many as there is room for
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
LAYER, ROW = 14_912_384, 896  # parameters
EMBEDDINGS = 0.25  # their share of the model, about as in that one

Bare = Callable[[VersionFile], Callable[[], Any]]  # makes ready; what that returns is the load


def make(folder: Path, mb: int, dtype: str) -> None:
    num = mb * 1e6 / getattr(torch, dtype).itemsize
    rows = int(num * EMBEDDINGS / ROW) // 64 * 64
    layers = max(1, round((num - rows * ROW) / LAYER))
    config = {**SHAPE, "dtype": dtype, "vocab_size": rows, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(read_config(folder), getattr(torch, dtype), "meta")
    block = torch.randn(1 << 20).mul_(0.02).to(getattr(torch, dtype))
    for version in (1, 2):
        torch.manual_seed(version)
        named = ((name, _filled(p, block)) for name, p in model.named_parameters())
        file = write_tensors(folder / f"v{version}.bin", version, named)
        (folder / f"v{version}.json").write_text(json.dumps(asdict(file)))


def _filled(parameter: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    repeats = -(-parameter.numel() // len(block))
    shift = int(torch.randint(len(block), ()))
    flat = block.roll(shift).repeat(repeats)[: parameter.numel()]
    return flat.view(parameter.shape)


def measure(folder: Path, kind: str, dtype: str, repeat: int) -> dict[str, Any]:
    spec = EngineSpec(kind, str(folder), dtype, 128, 2, kv_cache_gib=0.05)  # pyright: ignore
    files = [VersionFile(**json.loads((folder / f"v{v}.json").read_text())) for v in (1, 2)]
    engine, bare = ENGINES[kind](spec)
    with growth() as of_first:  # what it takes may not go back to the kernel, and be used again
        engine.load_weights(files[1])
    took: dict[str, list[float]] = {"load": [], "bare": []}
    for i in range(repeat):
        file = files[i % 2]
        took["bare"].append(_timed(bare(file)))
        took["load"].append(_timed(partial(engine.load_weights, file)))
    with growth() as of_load:
        engine.load_weights(files[0])
    act = bare(files[1])
    with growth() as of_bare:
        act()
    engine.load_weights(files[0])
    engine.close()
    grown = {"first": of_first(), "load": of_load(), "bare": of_bare()}
    return {"num_bytes": files[0].num_bytes, "seconds": took, "grown_bytes": grown}


def torch_engine(spec: EngineSpec) -> tuple[Any, Bare]:
    from lightrl.engine.torch.engine import TorchEngine

    engine = TorchEngine(spec)
    targets = engine._tensors._targets

    @torch.inference_mode()
    def copy(file: VersionFile, specs: tuple[TensorSpec, ...]) -> None:
        with open(file.path, "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        for s in specs:
            view = flat[s.offset : s.offset + s.num_bytes].view(getattr(torch, s.dtype))
            targets[s.name].copy_(view.view(s.shape))

    return engine, lambda file: partial(copy, file, read_manifest(file).tensors)


def vllm_engine(spec: EngineSpec) -> tuple[Any, Bare]:
    from lightrl.engine.vllm.engine import VllmEngine

    engine = VllmEngine(spec)

    def reload(worker: Any, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(worker.vllm_config):
            worker.model_runner.reload_weights(weights_iterator=named)

    def bare(file: VersionFile) -> Callable[[], Any]:
        from lightrl.weights.version.tensors import read_tensors

        ready = [(name, tensor.clone()) for name, tensor in read_tensors(file)]
        return partial(engine._core.collective_rpc, reload, args=(iter(ready),))

    return engine, bare


ENGINES = {"torch": torch_engine, "vllm": vllm_engine}


def _timed(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


@contextmanager
def growth() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the largest growth of this process's memory in bytes. Pages
    of the version are shared ones; "dirty" is what the kernel calls all that lie in tmpfs."""
    before, most, is_over = anonymous(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not is_over.wait(EVERY_S):
            most = max(most, anonymous() - before)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield lambda: most
    finally:
        is_over.set()
        looking.join()


def anonymous() -> int:
    for line in Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise OSError("smaps_rollup has no anonymous memory")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", where, mb, dtype]:
            make(Path(where), int(mb), dtype)
        case [_, where, kind, dtype, repeat]:
            print(json.dumps(measure(Path(where), kind, dtype, int(repeat))))
        case _:
            sys.exit(__doc__)
