"""A policy as a model directory that transformers and vLLM read: safetensors, config, tokenizer.

Owns how its tensors come together on rank 0: one part of the export at a time is held there, and
nothing but its own shards on any other rank.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from lightrl.trainer.model import Policy, shards
from lightrl.weights.publish.publisher import Shard

PART_BYTES = 2 << 30  # of a safetensors file, if no layer is larger
PROBLEMS = (OSError, RuntimeError, ValueError, SafetensorError)
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".safetensors.index.json",
    ".bin.index.json",
)


def export(folder: Path, policy: Policy, model_dir: Path) -> None:
    """Writes a new `folder`, in the dtypes of `model_dir` and with its small files. Call on all
    ranks.

    Raises one of PROBLEMS on rank 0 if it cannot, after all ranks have done their part.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    ignored = policy.module._keys_to_ignore_on_save or ()
    parts = list(_parts([s for s in shards(policy, is_stored=True) if s.name not in ignored]))
    weight_map: dict[str, str] = {}
    problem: Exception | None = None
    for index, part in enumerate(parts, start=1):
        number = f"-{index:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        file = f"model{number}.safetensors"
        tensors = {shard.name: _whole(shard) for shard in part}
        if first and problem is None:
            try:
                folder.mkdir(exist_ok=True)
                weight_map |= dict.fromkeys(_save(folder / file, policy, tensors), file)
            except PROBLEMS as e:  # the others give their shards all the same
                problem = e
    if problem is not None:
        raise problem
    if first:
        _finish(folder, weight_map if len(parts) > 1 else {}, model_dir)


def _parts(whole: list[Shard]) -> Iterator[list[Shard]]:
    """Layers stay together: what transformers has joined when it loaded them, or split, is undone
    within one."""
    part: list[Shard] = []
    num_bytes = 0
    layers: dict[str, list[Shard]] = {}
    for shard in whole:
        layers.setdefault(_layer(shard.name), []).append(shard)
    for layer in layers.values():
        size = sum(shard.numel * shard.dtype.itemsize for shard in layer)
        if part and num_bytes + size > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part += layer
        num_bytes += size
    if part:
        yield part


def _layer(name: str) -> str:
    """Example: _layer("model.layers.7.mlp.up_proj.weight") == "model.layers.7"."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else name


def _whole(shard: Shard) -> Tensor:
    """The tensor on rank 0; nothing elsewhere."""
    values = shard.values.to(shard.dtype).cpu()
    if not shard.stride:
        return values.view(shard.shape) if len(values) else values
    world, first = dist.get_world_size(), dist.get_rank() == 0
    # As bytes: not every dtype is known to every backend.
    size = shard.stride * shard.dtype.itemsize
    mine = torch.zeros(size, dtype=torch.uint8)
    mine[: values.nbytes] = values.view(torch.uint8)
    whole = torch.empty(size * world if first else 0, dtype=torch.uint8)
    dist.gather(mine, list(whole.split(size)) if first else None)
    if not first:
        return whole
    return whole[: shard.numel * shard.dtype.itemsize].view(shard.dtype).view(shard.shape)


def _save(path: Path, policy: Policy, tensors: dict[str, Any]) -> list[str]:
    """The names under which the tensors are in the file: those of the model directory."""
    named = revert_weight_conversion(policy.module, tensors)
    named = {name: tensor.contiguous() for name, tensor in named.items()}
    save_file(named, path, {"format": "pt"})
    path.chmod(0o644)  # safetensors writes files that only their owner can read
    return list(named)


def _finish(folder: Path, weight_map: dict[str, str], model_dir: Path) -> None:
    """All but the weights. `config.json` is that of `model_dir`: what transformers would write
    names the dtype of the master weights."""
    if weight_map:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for file in sorted(model_dir.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, folder / file.name)
