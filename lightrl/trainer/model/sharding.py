"""Divides a module among the ranks: FSDP2 with one group per decoder layer, and activation
checkpointing.

Masters are float32; on CUDA, with one rank or many, they are computed in bfloat16 and reduced in
float32, on a processor all is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightrl.errors import TrainerError
from lightrl.trainer.group import COLLECTIVE_TIMEOUT_S, join_alone

COMPUTED = {"cuda": torch.bfloat16}  # others in float32


@dataclass(frozen=True)
class RankPlacement:
    """Where a model lies: on `world` ranks in `replicas`, each divided among world / replicas
    ranks; `is_offloaded`: in the memory of the host."""

    device: torch.device
    world: int = 1
    replicas: int = 1
    is_offloaded: bool = False


def is_divided(placement: RankPlacement, dtypes: set[torch.dtype]) -> bool:
    """Return whether FSDP is needed for parameters of these dtypes."""
    computed = COMPUTED.get(placement.device.type, torch.float32)
    return placement.world > 1 or dtypes != {computed}


def shard(module: nn.Module, placement: RankPlacement) -> None:
    """Divide the module, which may be on the meta device. A collective. Its gradients are means
    over ranks. Raises TrainerError, one line, if it has no layers."""
    device = placement.device
    if placement.world == 1:
        join_alone(device)
    mesh = _mesh(placement)
    computed = COMPUTED.get(device.type, torch.float32)
    precision = MixedPrecisionPolicy()
    if any(p.dtype != computed for p in module.parameters()):
        # in float32 the canary rounds parameters, and so what goes from layer to layer
        precision = MixedPrecisionPolicy(
            param_dtype=computed,
            reduce_dtype=torch.float32,
            cast_forward_inputs=computed != torch.float32,
        )
    offload = OffloadPolicy()
    if placement.is_offloaded:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    # a backward pass begins with the root, which stays gathered unless it is frozen
    is_kept = any(p.requires_grad for p in module.parameters())
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=None if is_kept else True,
    )


def materialize(module: Any, placement: RankPlacement) -> None:
    """Allocate this rank's part of a module on the meta device, with arbitrary content."""
    device = placement.device
    is_offloaded = placement.is_offloaded and placement.device.type != "cpu"
    module.to_empty(device="cpu" if is_offloaded else device)
    if is_offloaded:  # buffers stay on the device
        for part in module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)
    module.tie_weights()  # which are two tensors now


def layers(module: nn.Module) -> list[nn.Module]:
    """Return the decoder layers that the family names, else the longest list of modules. Raises
    TrainerError, one line."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found = [part for part in module.modules() if type(part).__name__ in names]
    if not found:
        lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
        found = list(max(lists, key=len, default=()))
    if not found:
        raise TrainerError(f"{type(module).__name__}: has no layers by which it can be divided")
    return found


def recompute(layer: nn.Module) -> None:
    """Keep the input of a layer alone, and compute the rest again in the backward pass.

    transformers does so in training mode only, where dropout (OPT) and jitter of routers (Mixtral)
    change probabilities.
    """
    own: Callable[..., Any] = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # evaluation mode draws no random number
        return checkpoint(own, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    setattr(layer, "forward", forward)  # noqa: B010 - FSDP changes the class, and looks here first


def row_range(tensor: Tensor) -> tuple[int, int]:
    """Return (first, end) of this rank's rows; (0, 1) of a scalar."""
    length = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, length
    mesh = tensor.device_mesh
    rank = mesh.get_local_rank(mesh.ndim - 1)
    chunk = -(-length // mesh.size(mesh.ndim - 1))  # as torch.chunk and so FSDP2 divide rows
    first, end = min(rank * chunk, length), min((rank + 1) * chunk, length)
    if (here := tensor.to_local().shape[0]) != end - first:
        raise TrainerError(f"a rank has {here} of {length} rows instead of {first} to {end}")
    return first, end


def is_published_here(tensor: Tensor) -> bool:
    """Return whether this rank's rows go into versions: those of the first replica do."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    mesh = tensor.device_mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def _mesh(placement: RankPlacement) -> DeviceMesh:
    world, replicas = placement.world, placement.replicas
    if replicas == 1:
        return init_device_mesh(placement.device.type, (world,))
    names = ("replicas", "rows")
    mesh = init_device_mesh(
        placement.device.type, (replicas, world // replicas), mesh_dim_names=names
    )
    for name in names:  # else ten minutes
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S), mesh.get_group(name))
    return mesh
