"""LoRA adapters within a model of transformers: which layers get one, how it begins, and what its
tensors are called where others read them.

Owns the module's structure alone, by peft, so that trainer and engines have the same. What is
trained is the trainer's business (trainer/model/lora.py), how versions of them travel that of
`weights`. Imports torch, and peft once there are adapters; daemons must not import this.
"""

import difflib
import hashlib
from collections.abc import Sequence
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightrl.errors import ConfigError
from lightrl.model_files import is_target

ADAPTER = "default"  # peft's name for the only one
PREFIX = "base_model.model."  # of names in peft's files, before the name of the module
_PARTS = (".lora_A.", ".lora_B.")


class AdapterSettings(Protocol):
    """The settings of an adapter, as in `model.lora`."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def targets(self) -> tuple[str, ...]: ...


def add_adapters(module: nn.Module, settings: AdapterSettings) -> None:
    """Freezes the module and puts adapters beside its linear layers, in float32, where these are.

    They begin as others of the same names and shapes do, on every rank and at each start; on meta
    they have no values, see `initial`. Raises ConfigError for targets that it does not have.
    """
    from peft import inject_adapter_in_model

    module.requires_grad_(False)
    inject_adapter_in_model(_peft_config(module, settings), module, ADAPTER)
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            if parameter.device.type != "meta":
                parameter.data.copy_(initial(name, tuple(parameter.shape)))
        parameter.requires_grad_(is_adapter(name))


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the float32 values of an adapter's parameter before training: B is zero, so that the
    model is unchanged; A is uniform, as in a linear layer."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    seed = hashlib.blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
    limit = 1 / sqrt(shape[1])
    return torch.empty(shape).uniform_(-limit, limit, generator=generator)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is one of an adapter, not of the model."""
    return any(part in name for part in _PARTS)


def public_name(name: str) -> str:
    """Return the name of a parameter or buffer in files: for an adapter as in peft's files,
    otherwise as in the model without adapters."""
    if is_adapter(name):
        return PREFIX + name.replace(f".{ADAPTER}.", ".")
    return name.replace(".base_layer.", ".")


def peft_file(module: nn.Module, base: str) -> dict[str, Any]:
    """adapter_config.json of a module with adapters to the model `base`."""
    config: Any = getattr(module, "peft_config")[ADAPTER]  # noqa: B009 - untyped
    table: dict[str, Any] = config.to_dict()
    table["target_modules"] = sorted(table["target_modules"])
    return table | {"base_model_name_or_path": base, "inference_mode": True}


def linear_layers(module: nn.Module) -> list[str]:
    """The names of all layers that can have an adapter; not the head's."""
    find_head = getattr(module, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    found = module.named_modules()
    return [name for name, part in found if isinstance(part, nn.Linear) and part is not head]


def _peft_config(module: nn.Module, settings: AdapterSettings) -> Any:
    from peft import LoraConfig

    names = require_layers(module, settings.targets)
    targets = settings.targets or {name.rpartition(".")[2] for name in names}
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType] - any number
        # Names in full: of a part of one, the head could have it, too.
        target_modules=[n for n in names if any(is_target(n, t) for t in targets)],
        task_type="CAUSAL_LM",
    )


def require_layers(module: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the `linear_layers`; raise ConfigError if none exists or a target is none of them."""
    names = linear_layers(module)
    if not names:
        raise ConfigError(f"model.lora.rank: {type(module).__name__} has no linear layers")
    for target in targets:
        if not any(is_target(name, target) for name in names):
            _refuse(module, target, names)
    return names


def _refuse(module: nn.Module, target: str, names: list[str]) -> None:
    """Raises ConfigError with the nearest names."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    near = difflib.get_close_matches(target, [*kinds, *names], n=3, cutoff=0.5) or kinds
    kind = type(module).__name__
    raise ConfigError(
        f"model.lora.targets: {target!r} is the name of no linear layer of {kind}; there are "
        f"{', '.join(near)}"
    )
