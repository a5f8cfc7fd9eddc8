"""The policy as a torch module on one rank, and its shards in a version. `loading` reads it,
`sharding` divides it among the ranks, `forward` computes it.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from lightrl.adapters import AdapterSettings, add_adapters, is_adapter, public_name
from lightrl.errors import LightRLError, TrainerError, first_line
from lightrl.rope import settle
from lightrl.trainer.model import forward, loading
from lightrl.trainer.model.collate import Batch
from lightrl.trainer.model.sharding import (
    RankPlacement,
    is_divided,
    is_published_here,
    layers,
    materialize,
    recompute,
    row_range,
    shard,
)
from lightrl.weights.publish.publisher import Shard
from lightrl.weights.version.tensors import served_dtype


@dataclass(frozen=True)
class Policy:
    """A causal language model with float32 master weights, or frozen.

    `stored`: the dtype of each parameter and persistent buffer in the model directory; `served`:
    that of parameters in versions; `way`: how it is computed, on `device`.
    """

    module: PreTrainedModel
    stored: dict[str, torch.dtype]
    served: torch.dtype
    way: forward.Way
    device: torch.device
    # LoRA: the model is frozen
    has_adapters: bool = False

    @property
    def vocabulary(self) -> int:
        """Token ids are smaller than this."""
        return forward.num_embeddings(self.module)


def load_policy(
    model_dir: Path,
    device: torch.device,
    world: int = 1,
    activation_checkpointing: bool = False,
    served: str = "auto",
    replicas: int = 1,
    is_offloaded: bool = False,
    lora: AdapterSettings | None = None,
    max_length: int = 0,
    use: Literal["trained", "reference", "served"] = "trained",
) -> Policy:
    """Load the model of a local HF directory. A collective of the `world` ranks.

    `served`: `model.dtype` of the config. `replicas`, `is_offloaded`: see `RankPlacement`. `lora`:
    adapters are trained, the model stays as it is stored. `max_length`: of the longest sequence,
    for rotary embeddings that depend on it (lightrl/rope.py); 0 = as transformers does.

    `use`: a reference has no gradients, and is in bfloat16 on CUDA, and on a processor if its files
    are, where it is computed in float32. To be served by one rank, parameters have the dtype that
    is served, adapters their initial values. Raises TrainerError, one line, if transformers cannot
    load the model, ConfigError for unknown targets.
    """
    placement = RankPlacement(device, world, replicas, is_offloaded)
    is_frozen, is_alone = use != "trained", use == "served"
    if not (model_dir / "config.json").is_file():  # transformers would download it
        raise TrainerError(f"{model_dir}: not a model directory: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        note = settle(config, max_length) if max_length else ""
        dtype_served = served_dtype(served, config, device.type)
        module = loading.build(config)
        stored = loading.stored_dtypes(module, model_dir)
        if is_frozen:
            frozen = dtype_served if is_alone else _frozen_dtype(module, stored, device)
            loading.cast(module, frozen)
            module.requires_grad_(False)
        if lora is not None:
            if not is_frozen:
                loading.cast_as_stored(module, stored)
            add_adapters(module, lora)
            stored |= loading.adapter_dtypes(module)
        if activation_checkpointing:
            for layer in layers(module):
                recompute(layer)
        if not is_alone and is_divided(placement, {p.dtype for p in module.parameters()}):
            shard(module, placement)
        materialize(module, placement)
        is_first = placement.world == 1 or dist.get_rank() == 0
        whole = loading.read(model_dir, module) if is_first else None
    except (LightRLError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # code of families differs
        raise TrainerError(f"{model_dir}: cannot be loaded: {first_line(e)}") from e
    loading.fill(module, whole, placement)
    way = forward.prepare(module, device)
    if note:
        way = replace(way, notes=(*way.notes, note))
    return Policy(module, stored, dtype_served, way, device, has_adapters=lora is not None)


def _frozen_dtype(
    module: PreTrainedModel, stored: dict[str, torch.dtype], device: torch.device
) -> torch.dtype:
    """On a processor without loss: its differences to the policy are figures."""
    of_files = {stored[name] for name, _ in module.named_parameters()}
    is_exact = of_files == {torch.bfloat16}
    return torch.bfloat16 if device.type == "cuda" or is_exact else torch.float32


def response_logprobs(
    policy: Policy, batch: Batch, temperature: float = 1.0, is_entropy_trained: bool = False
) -> tuple[Tensor, Tensor]:
    """See `forward.response_logprobs`: float32 [rows, width] each."""
    return forward.response_logprobs(
        policy.module, policy.way, batch, temperature, is_entropy_trained
    )


def shards(policy: Policy, is_stored: bool = False, of_base: bool = False) -> list[Shard]:
    """Return this rank's part of each parameter and persistent buffer under its HF name, tied ones
    once; of a policy with adapters these alone, under peft's names, or `of_base` all others.

    Parameters have the dtype that is served, buffers that of computing; with `is_stored` all have
    that of the model directory. No collective.
    """
    parameters = {id(parameter) for parameter in policy.module.parameters()}
    found: dict[int, Shard] = {}
    # state_dict has FSDP put its shards in place
    for name, tensor in policy.module.state_dict(keep_vars=True).items():
        if id(tensor) not in found and is_adapter(name) == (policy.has_adapters and not of_base):
            dtype = policy.served if id(tensor) in parameters else tensor.dtype
            if is_stored:
                dtype = policy.stored[public_name(name)]
            found[id(tensor)] = _shard_of(public_name(name), tensor.detach(), dtype)
    return list(found.values())


def _shard_of(name: str, tensor: Tensor, dtype: torch.dtype) -> Shard:
    """FSDP gives each rank equally many rows, but for the last ranks."""
    shape = tuple(tensor.shape)
    here = is_published_here(tensor)
    if not isinstance(tensor, DTensor):
        values = tensor.reshape(-1)
        return Shard(name, dtype, shape, values if here else values[:0])
    first, _ = row_range(tensor)
    values = tensor.to_local().reshape(-1)
    row, mesh = prod(shape[1:]), tensor.device_mesh
    chunk = -(-shape[0] // mesh.size(mesh.ndim - 1))
    return Shard(name, dtype, shape, values if here else values[:0], first * row, chunk * row)
