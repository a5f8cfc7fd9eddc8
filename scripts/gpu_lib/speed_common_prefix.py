"""Measure how far the same noise repeats a response: the tokens that two runs of vLLM have in
common from the start, when the batch changes, and when the weights change by one update.

A bound for speculation from history: drafts of an earlier epoch are right for about that long.

    python -m gpu_lib.speed_common_prefix 0.5b
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_lib.notes import figure
from gpu_lib.parts import ROOT
from gpu_lib.shapes import SHAPES, make_model, on_device, shape_for
from gpu_lib.speed_engine import memory_folder

IS_GPU = on_device() == "cuda"
NUM_TOKENS = 4096 if IS_GPU else 48
RESPONSES = 64  # that run concurrently
FEW = 8  # that run concurrently in the second run
GROUP_SIZE = 4
MAX_LENGTH = NUM_TOKENS + 64
LR = 1e-6  # the largest change of a weight in a step of Adam at this learning rate


def main() -> None:
    shape = shape_for(sys.argv[1])
    sys.path.append(str(ROOT))
    with tempfile.TemporaryDirectory(prefix="lightrl-gpu-", dir=memory_folder()) as scratch:
        measure(shape, Path(scratch))


def measure(shape: str, scratch: Path) -> None:
    from safetensors.torch import load_file

    from lightrl.engine.base import EngineSpec
    from lightrl.weights.version.tensors import write_tensors
    from tests.gpu.coupled import requests
    from tests.gpu.driver import Driven

    model = make_model(scratch / "model", shape, on_device())
    weights = load_file(model / "model.safetensors")
    first = write_tensors(scratch / "v1.bin", 1, weights.items())
    second = write_tensors(scratch / "v2.bin", 2, updated(weights).items())
    args = {"gpu_memory_utilization": 0.5} if IS_GPU else {}
    dtype = "bfloat16" if IS_GPU else "float32"
    spec = EngineSpec("vllm", str(model), dtype, MAX_LENGTH, RESPONSES, engine_args=args)
    engine = Driven(spec)
    engine.load(first)
    asked = requests(SHAPES[shape]["vocab_size"], RESPONSES // GROUP_SIZE, GROUP_SIZE, NUM_TOKENS)
    expected = engine.run(asked).tokens
    again = engine.run(asked).tokens
    report(shape, "the same batch", expected, again)
    smaller = engine.run(asked[::4], at_once=FEW).tokens
    report(shape, f"{FEW} concurrently instead of {RESPONSES}", expected, smaller)
    engine.load(second)
    report(shape, f"weights changed by +-{LR:g}", expected, engine.run(asked).tokens)
    engine.close()


def updated(weights: dict[str, Any]) -> dict[str, Any]:
    """As Adam's first step changes float32 masters: each by the learning rate, up or down."""
    import torch

    noise = torch.Generator().manual_seed(2)

    def step(tensor: Any) -> Any:
        # the master has bits below those of bfloat16: few roundings change
        signs = torch.rand(tensor.shape, generator=noise).round_().mul_(2).sub_(1)
        below = torch.rand(tensor.shape, generator=noise).sub_(0.5)
        unit = 2.0 ** (tensor.float().abs().clamp_min_(1e-30).log2().floor() - 7)
        return (tensor.float() + below * unit + LR * signs).to(tensor.dtype)

    return {name: step(tensor) for name, tensor in weights.items()}


def report(shape: str, what: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    lengths = [num_common(expected[name], tokens) for name, tokens in found.items()]
    whole = [n == len(expected[name]) for n, name in zip(lengths, found, strict=True)]
    about = f"{shape}, {len(lengths)} responses of {NUM_TOKENS} tokens, {what}"
    figure(f"{about}: common prefix, median", statistics.median(lengths))
    figure(f"{about}: common prefix, least", min(lengths))
    figure(f"{about}: share that is the same to the end", round(sum(whole) / len(whole), 3))


def num_common(a: list[int], b: list[int]) -> int:
    """Return the number of tokens that are equal from the start."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    main()
