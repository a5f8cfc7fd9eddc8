"""Compute the share of a GPU that a vLLM engine takes beside others."""

from typing import TYPE_CHECKING, Any

from lightrl.engine.base import EngineSpec
from lightrl.errors import EngineError

if TYPE_CHECKING:
    import torch


def shared_memory_args(
    spec: EngineSpec, config: Any, targets: "dict[str, torch.Tensor]", args: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments for an engine that may take `spec.gpu_memory` of each of its GPUs, beside
    others. Raises EngineError.

    vLLM measures how much it may use, and counts what others allocate meanwhile as its own. So the
    size of the KV cache is given; vLLM then checks its share once only, when it starts.
    """
    import torch

    from lightrl.devices import memory

    shape = memory.shape_of(config.to_dict())
    asked = {
        "gpu_memory_utilization": spec.engine_args.get("gpu_memory_utilization", spec.gpu_memory)
    }
    if shape is None or args.get("kv_cache_memory_bytes"):
        return asked
    gpus = int(args.get("tensor_parallel_size", 1)) * int(args.get("pipeline_parallel_size", 1))
    weights = sum({id(t): t.numel() * t.element_size() for t in targets.values()}.values())
    share = int(asked["gpu_memory_utilization"] * torch.cuda.get_device_properties(0).total_memory)
    slots, length = int(args["max_num_seqs"]), int(args["max_model_len"])
    kv = memory.kv_cache_bytes(share, weights, shape, slots, length, gpus)
    if not kv:
        raise EngineError(
            f"{share / memory.GIB:.1f} GiB of the GPU are too few for the weights and one sequence "
            f"of {length:,} tokens; see lightrl up --dry-run"
        )
    return asked | {"kv_cache_memory_bytes": kv}


def left_on_gpu(spec: EngineSpec) -> float:
    """Return the bytes that an engine may still take, once it is built with its KV cache."""
    import torch

    free, total = torch.cuda.mem_get_info()
    if spec.gpu_memory:
        return max(0.0, min(free, spec.gpu_memory * total - torch.cuda.memory_reserved()))
    return free
