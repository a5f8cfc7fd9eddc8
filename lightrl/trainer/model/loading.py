"""Loads a model: the first rank reads it with transformers, the others receive it tensor by tensor,
and each keeps its share.

Three steps, between which a module can be changed: `build` (no memory), `shard` of `sharding`,
`fill`.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightrl.adapters import initial, is_adapter, public_name
from lightrl.errors import TrainerError
from lightrl.model_files import stored_tensors
from lightrl.trainer.model.sharding import RankPlacement, row_range

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def build(config: Any) -> PreTrainedModel:
    """Build the model on the meta device, in float32 and in evaluation mode. Raises ValueError, or
    another error of its family, if `config` is not that of a causal model."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    return module.eval()


def stored_dtypes(module: PreTrainedModel, model_dir: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter and persistent buffer in the files; the most common one
    for those that have another name there. Raises ConfigError if files are missing, TrainerError
    if they are quantised."""
    found: dict[str, torch.dtype] = {}
    for name, (_, entry) in stored_tensors(model_dir).items():
        if (kind := entry.get("dtype")) not in DTYPES:
            raise TrainerError(
                f"{model_dir}: {name} is quantised ({kind}); use a model in bfloat16 or float32"
            )
        found[name] = DTYPES[kind]
    usual = max(found.values(), key=list(found.values()).count, default=torch.float32)
    return {name: found.get(name, usual) for name in module.state_dict(keep_vars=True)}


def read(model_dir: Path, module: PreTrainedModel) -> PreTrainedModel:
    """Read the whole model, of which `module` is a part, in float32.

    Raises TrainerError, one line, if parameters are missing or have another shape, or if tied ones
    differ.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=module.config,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    whole, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise TrainerError(
            f"{model_dir}: {len(missing)} tensors of a {type(whole).__name__} are not in its "
            f"files: {missing[0]}"
        )
    for name, there, here in found["mismatched_keys"]:
        raise TrainerError(
            f"{model_dir}: {name} has shape {tuple(there)}, its config.json says {tuple(here)}"
        )
    for name in _tensors(whole).keys() - map(public_name, _tensors(module)):
        raise TrainerError(
            f"{model_dir}: config.json ties {name} to {module.all_tied_weights_keys.get(name)}, "
            "but they differ in its files; set tie_word_embeddings to false there"
        )
    return whole


@torch.no_grad()
def fill(module: PreTrainedModel, whole: PreTrainedModel | None, placement: RankPlacement) -> None:
    """Set all parameters and buffers from the `whole` model, which the first rank alone has, and
    frees. A collective. The module keeps the conversions of the files, for exports."""
    if whole is not None:
        conversions = getattr(whole, "_weight_conversions", None)
        setattr(module, "_weight_conversions", conversions)  # noqa: B010 - not its own
    found = _tensors(whole) if whole is not None else {}
    for name, target in _tensors(module).items():
        shape = tuple(target.shape)
        if is_adapter(name):
            value = initial(name, shape)
        elif whole is not None:
            value = found[public_name(name)].detach()
        else:
            dtype = torch.float32 if isinstance(target, nn.Parameter) else target.dtype
            value = torch.empty(shape, dtype=dtype, device=placement.device)
        if placement.world > 1 and not is_adapter(name):
            value = value.to(placement.device).contiguous()
            dist.broadcast(value, 0)
        if isinstance(target, DTensor):
            first, end = row_range(target)
            target.to_local().copy_(value[first:end])
        else:
            target.copy_(value)
        if (read := found.pop(public_name(name), None)) is not None:
            read.data = torch.empty(0)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, on the meta device; buffers keep their dtype."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def cast_as_stored(module: nn.Module, stored: dict[str, torch.dtype]) -> None:
    """Cast each parameter to its dtype in the files."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(stored[name])


def adapter_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of adapters by name, as `stored_dtypes` does for a model."""
    return {public_name(n): p.dtype for n, p in module.named_parameters() if is_adapter(n)}
