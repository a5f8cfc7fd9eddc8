"""How a module lies on the ranks: FSDP2 with one group per decoder layer, and activations that are
computed again.

Owns which rank has which rows, and the one recipe of precision: masters in float32, on CUDA
computed in bfloat16 and reduced in float32, whether there is one rank or many; on a processor all
in float32. Knows neither files nor passes.
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

COMPUTED = {"cuda": torch.bfloat16}  # in which a kind of device computes; others in float32


@dataclass(frozen=True)
class Placement:
    """Where a model is to be: `world` ranks in `replicas`, each of them divided among world /
    replicas; `is_offloaded`: what a rank has lies in the memory of its host."""

    device: torch.device
    world: int = 1
    replicas: int = 1
    is_offloaded: bool = False


def is_divided(placement: Placement, dtypes: set[torch.dtype]) -> bool:
    """Whether FSDP is needed, for parameters in these: not where one rank computes in that."""
    computed = COMPUTED.get(placement.device.type, torch.float32)
    return placement.world > 1 or dtypes != {computed}


def shard(module: nn.Module, placement: Placement) -> None:
    """A collective. Gradients come out as the mean over ranks: see `learner`. The module may be on
    the meta device. Raises TrainerError, one line, if it has no layers."""
    device = placement.device
    if placement.world == 1:
        join_alone(device)
    mesh = _mesh(placement)
    computed = COMPUTED.get(device.type, torch.float32)
    precision = MixedPrecisionPolicy()
    if any(p.dtype != computed for p in module.parameters()):
        # In float32 the canary rounds parameters, and with them what goes from layer to layer.
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
    # A backward pass needs the root at once; of what is frozen nothing is kept.
    is_kept = any(p.requires_grad for p in module.parameters())
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=None if is_kept else True,
    )


def materialize(module: Any, placement: Placement) -> None:
    """Memory, of arbitrary content, for what this rank has of a module on the meta device, be it
    divided or not."""
    device = placement.device
    is_offloaded = placement.is_offloaded and placement.device.type != "cpu"
    module.to_empty(device="cpu" if is_offloaded else device)
    if is_offloaded:  # what is computed with as it is
        for part in module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)
    module.tie_weights()  # what was one tensor has become two


def layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: those that the family names, else the longest list of modules in it.
    Raises TrainerError, one line."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found = [part for part in module.modules() if type(part).__name__ in names]
    if not found:
        lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
        found = list(max(lists, key=len, default=()))
    if not found:
        raise TrainerError(f"{type(module).__name__}: has no layers by which it can be divided")
    return found


def recompute(layer: nn.Module) -> None:
    """Has the layer keep its input alone and compute the rest again in the backward pass.

    Not by transformers, which does so in training mode only: there dropout that is called as a
    function (OPT) and the jitter of routers (Mixtral) change probabilities from call to call.
    """
    own: Callable[..., Any] = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # No random number is drawn in evaluation mode.
        return checkpoint(own, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    setattr(layer, "forward", forward)  # noqa: B010 - FSDP changes the class, and looks here first


def row_range(tensor: Tensor) -> tuple[int, int]:
    """(first, end) of the rows that this rank has; (0, 1) of a scalar."""
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
    """Whether this rank's rows are those that go into versions: of several replicas the first."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    mesh = tensor.device_mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def _mesh(placement: Placement) -> DeviceMesh:
    world, replicas = placement.world, placement.replicas
    if replicas == 1:
        return init_device_mesh(placement.device.type, (world,))
    names = ("replicas", "rows")
    mesh = init_device_mesh(
        placement.device.type, (replicas, world // replicas), mesh_dim_names=names
    )
    for name in names:  # which have a limit of ten minutes, whatever that of all ranks is
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S), mesh.get_group(name))
    return mesh
