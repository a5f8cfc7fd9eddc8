"""LoRA adapters in vLLM: how requests name them, and how a version of them replaces the one before.

All uses of vLLM's own LoRA are in this file. One adapter, always under the same name, so keys and
values of an older one must go with it: `VllmEngine` sees to that. Tensors come straight from the
version's file, not from a folder as peft saves it.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightrl.engine.base import LoraSpec
from lightrl.errors import WeightsError

if TYPE_CHECKING:
    import torch

NAME, ID = "lightrl", 1
BASE_LAYER = ".base_layer"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def engine_args(lora: LoraSpec) -> dict[str, Any]:
    """Return arguments for vLLM's EngineArgs. The config bounds `lora.rank` by RANKS."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
    }


def request(*, in_place: bool = False) -> Any:
    """Return the adapter of a request for tokens; `in_place`: the order to load other tensors for
    it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, ID, NAME, load_inplace=in_place)


def base_layer_names(
    model: Any, tensors: "Iterable[tuple[str, torch.Tensor]]"
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield weights of the base model under the names that they have below adapters.

    `reload_weights` of releases with vllm.model_executor.model_loader.reload.inplace renames them
    itself; 0.26 does not.
    """
    if find_spec("vllm.model_executor.model_loader.reload.inplace") is not None:
        yield from tensors
        return
    wrapped = {
        name.removesuffix(BASE_LAYER).rpartition(".")[2]
        for name, _ in model.named_modules()
        if name.endswith(BASE_LAYER)
    }
    packed = getattr(model, "packed_modules_mapping", {})
    wrapped |= {part for whole, parts in packed.items() if whole in wrapped for part in parts}
    for name, tensor in tensors:
        module, _, parameter = name.rpartition(".")
        is_wrapped = module.rpartition(".")[2] in wrapped
        yield (f"{module}{BASE_LAYER}.{parameter}" if is_wrapped else name), tensor


def load(runner: Any, tensors: "Iterable[tuple[str, torch.Tensor]]", lora: LoraSpec) -> None:
    """Replace a worker's adapters. Raises WeightsError for a layer that vLLM has no adapter for."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = runner.lora_manager
    helper = PEFTHelper(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - it divides it only
        target_modules=list(lora.targets) or "all-linear",
    )
    mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    older = getattr(mapper, "get_unstacked_mapper", None)  # its name in 0.26
    rename = getattr(mapper, "get_rename_mapper", older)
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
