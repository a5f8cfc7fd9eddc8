"""Versions of a model that is really trained, and how good their delta is."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lightrl.weights.delta.encoding import Bytes, decode_bucket, encode_bucket
from lightrl.weights.version.layout import TensorSpec, bucket_range, num_buckets, num_bytes, plan


@dataclass(frozen=True)
class Measured:
    """A delta beside what it is measured by."""

    changed_share: float  # of elements
    full_bytes: int
    delta_bytes: int
    # of the changed positions and of the values, each as if independent
    entropy_bytes: float
    encode_s: float  # on one thread
    apply_s: float


def trained_versions(
    updates: int, learning_rate: float, width: int = 256, vocabulary: int = 4096
) -> Iterator[dict[str, torch.Tensor]]:
    """A small model with a tied head, in bfloat16 as it is served, before and after each update of
    its float32 masters by AdamW."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(vocabulary, width)
    layer = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    model = torch.nn.ModuleDict({"embed": embedding, "mlp": torch.nn.Sequential(*layer)})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.04)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(updates):
        yield _served(model)
        tokens = torch.randint(vocabulary, (256,))
        logits = model["mlp"](embedding(tokens)) @ embedding.weight.T
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, tokens.roll(1)).backward()
        optimizer.step()
    yield _served(model)


def _served(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}


def flat_version(tensors: dict[str, torch.Tensor]) -> tuple[tuple[TensorSpec, ...], bytearray]:
    """As the file of a version."""
    specs = plan(
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    )
    flat = bytearray(num_bytes(specs))
    for spec in specs:
        data = tensors[spec.name].contiguous().reshape(-1).view(torch.uint8).numpy()
        flat[spec.offset : spec.offset + spec.num_bytes] = data.tobytes()
    return specs, flat


def apply_bucket(base: Bytes, delta: Bytes, out: bytearray | memoryview) -> None:
    """Fills `out` with what `encode_bucket` was given as target."""
    change = decode_bucket(delta, len(base))
    memoryview(out)[:] = base
    change.apply(out)


def measure(base: memoryview, target: memoryview, itemsize: int) -> Measured:
    """The delta of two versions all of whose elements have this size, on this thread."""
    slices = [bucket_range(i, len(target)) for i in range(num_buckets(len(target)))]
    start = time.perf_counter()
    encoded = [encode_bucket(base[a:b], target[a:b], itemsize) for a, b in slices]
    encode_s = time.perf_counter() - start
    out = memoryview(bytearray(len(target)))
    start = time.perf_counter()
    for (a, b), delta in zip(slices, encoded, strict=True):
        apply_bucket(base[a:b], delta, out[a:b])
    apply_s = time.perf_counter() - start
    if out != target:
        raise AssertionError("the delta does not lead to the target")
    share, entropy = _entropy(base, target, itemsize)
    return Measured(share, len(target), sum(map(len, encoded)), entropy, encode_s, apply_s)


def _entropy(base: memoryview, target: memoryview, itemsize: int) -> tuple[float, float]:
    """(share of elements that changed, bytes)."""
    before = np.frombuffer(base, f"<u{itemsize}")
    after = np.frombuffer(target, f"<u{itemsize}")
    changed = before != after
    count = int(changed.sum())
    if not count:
        return 0.0, 0.0
    _, values = np.unique(after[changed] - before[changed], return_counts=True)
    positions = np.array([count, len(after) - count])
    bits = len(after) * _bits_each(positions) + count * _bits_each(values)
    return count / len(after), bits / 8


def _bits_each(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())
