"""LoRA adapters in vLLM: how it is asked for them, and how a version of them takes the place of the
one before.

All that LightRL knows of vLLM's own LoRA is in this file. One adapter, always under the same name,
so keys and values of an older one must go with it: `VllmEngine` sees to that. Tensors come straight
from the version's file, not from a folder as peft saves it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightrl.engine.base import LoraSpec
from lightrl.engine.vllm_versions import Call, Has, Part, Replaced
from lightrl.errors import WeightsError

if TYPE_CHECKING:
    import torch

NAME, ID = "lightrl", 1
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for

_WORKER = "vllm.lora.worker_manager:WorkerLoRAManager"
ADAPTERS: tuple[Part, ...] = (
    Has("vllm.engine.arg_utils:EngineArgs", ("enable_lora", "max_lora_rank", "max_loras")),
    Call("vllm.lora.request:LoRARequest", positional=3, keywords=("load_inplace",)),
    Call("vllm.lora.peft_helper:PEFTHelper", keywords=("r", "lora_alpha", "target_modules")),
    Call(
        "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
        positional=3,
        keywords=("device", "dtype", "weights_mapper"),
    ),
    Replaced(f"{_WORKER}._load_adapter", ("self", "lora_request")),
    Call("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter", positional=1),
    Has("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model", ()),
)


def engine_args(lora: LoraSpec) -> dict[str, Any]:
    """For vLLM's EngineArgs. `lora.rank` is at most the last of RANKS: the config sees to that."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
    }


def request(*, in_place: bool = False) -> Any:
    """What a request for tokens names; `in_place`: the order to take other tensors for it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, ID, NAME, load_inplace=in_place)


def load(runner: Any, tensors: "Iterable[tuple[str, torch.Tensor]]", lora: LoraSpec) -> None:
    """In a worker: these are the adapters from now on, instead of those before. Raises WeightsError
    for a layer that vLLM has no adapter for."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = runner.lora_manager
    helper = PEFTHelper(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - it divides it only
        target_modules=list(lora.targets) or "all-linear",
    )
    mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    rename = getattr(mapper, "get_rename_mapper", None)
    # It scales what it is given in place.
    copied = {name: tensor.clone() for name, tensor in tensors}
    model = LoRAModel.from_lora_tensors(
        ID,
        copied,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=rename() if rename is not None else mapper,
    )
    manager._load_adapter = lambda _: model  # instead of from a folder
    try:
        manager.add_adapter(request(in_place=True))
    finally:
        del manager._load_adapter
    lacking = model.loras.keys() - manager._adapter_manager.modules.keys()
    if lacking:
        name = min(lacking)
        raise WeightsError(f"{name}: vLLM has no adapter for this layer; see model.lora.targets")
