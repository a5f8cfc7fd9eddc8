"""Versions that ranks publish together (test_publish.py): a file of their own, for ranks that need
not import transformers."""

import torch

from lightrl.weights.publish.publisher import Shard


def made(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several buckets, fewer rows than ranks, odd sizes, none at all; each version
    differs from the one before in few places, the last one everywhere."""
    torch.manual_seed(version // 3)
    shapes = {"a": (3, 5), "b": (1, 7), "c": (3001, 3000), "d": (2, 0), "e": (7, 1 << 20)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    for i in range(version):
        tensors["a"][i, 2] += 1
        tensors["c"].view(-1)[i + torch.arange(0, 9_000_000, 997)] += 1
    return tensors


def shards_of(tensors: dict[str, torch.Tensor], rank: int, world: int) -> list[Shard]:
    def cut(name: str, tensor: torch.Tensor) -> Shard:
        stride = -(-tensor.shape[0] // world) * tensor[0].numel()
        flat = tensor.reshape(-1)
        first = min(rank * stride, len(flat))
        values = flat[first : first + stride]
        return Shard(name, torch.bfloat16, tuple(tensor.shape), values, first, stride)

    scalar = torch.tensor([3.5] if rank == 0 else [])
    return [*(cut(*item) for item in tensors.items()), Shard("s", torch.float32, (), scalar)]
