"""Checks of a model by the headers of its files: it is not quantised, has the layers that
`model.lora.targets` names, and is of a family that the torch engine computes.

Must not import torch: if the files do not suffice, a process builds the model
(trainer/model/lora.py, engine/checkpoint.py).
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightrl.errors import ConfigError
from lightrl.model_files import is_target, stored_tensors

# As safetensors names them; those of quantised weights are others.
DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
UNFIT = 3  # exit status of a process that finds layers or attention missing
ASKED_S = 120.0


def require_dtypes(model_path: str, folder: Path) -> None:
    """Raise ConfigError for weights of a dtype that only quantised models have."""
    for name, tensor in _tensors(folder):
        if (kind := str(tensor.get("dtype"))) not in DTYPES:
            raise ConfigError(
                f"model.path = {model_path!r}: is quantised ({name} is {kind} in its files); use "
                "the model it was made from"
            )


def require_targets(folder: Path, targets: Sequence[str]) -> None:
    """Raise ConfigError, with the nearest names, for a target that is the name of no layer."""
    names = {
        name.removesuffix(".weight")
        for name, tensor in _tensors(folder)
        if name.endswith(".weight") and len(tensor.get("shape") or ()) == 2
    }
    layers = {name for name in names if _is_layer(name)}
    is_plain = not any(name.endswith(".c_attn") for name in names)  # GPT-2's own kind of layer
    if not is_plain or not all(any(is_target(name, t) for name in layers) for t in targets):
        _ask("lightrl.trainer.model.lora", folder, *targets)


def _is_layer(name: str) -> bool:
    """Return whether a matrix of the files is certainly a linear layer."""
    leaf = name.rpartition(".")[2]
    is_other = "embed" in leaf or leaf in {"lm_head", "wte", "wpe", "gate"}
    return not is_other and ".experts." not in name


def _tensors(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the headers; none if the weights are not here, or are refused when they are read."""
    with suppress(ConfigError):
        for name, (_, entry) in stored_tensors(folder).items():
            yield name, entry


def require_engine(model_path: str, folder: Path, model_type: str) -> None:
    """Raise ConfigError for a family that the torch engine cannot compute. A process builds the
    model, unless the source of its family in transformers has a causal model with SDPA."""
    spec = importlib.util.find_spec("transformers")
    family = model_type.replace("-", "_").removesuffix("_text")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        with suppress(OSError):
            source = Path(place, "models", family, f"modeling_{family}.py").read_text()
            if "_supports_sdpa = True" in source and "CausalLM" in source:
                return
    _ask("lightrl.engine.checkpoint", folder, prefix=f"model.path = {model_path!r}: ")


def _ask(module: str, folder: Path, *arguments: str, prefix: str = "") -> None:
    """Raise ConfigError if the process reports that the model is unfit. Ranks and engines find its
    other errors again."""
    command = (sys.executable, "-P", "-m", module, str(folder), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASKED_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode == UNFIT:
        raise ConfigError(prefix + done.stdout.strip())
