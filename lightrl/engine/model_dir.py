"""The contents of a model directory besides weights: config, tensor names and shapes, bytes of KV
cache.

Owns the check that a version of the weights fits the model; loads no weights. Imports torch and
transformers.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.adapters import AdapterSettings, add_adapters, is_adapter, public_name
from lightrl.errors import EngineError, WeightsError
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import VersionFile, decode, read_encoded, require_digest
from lightrl.weights.version.tensors import served_dtype

UNFIT = 3  # as in launch/checks/model.py, which must not import this
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(model_dir: Path) -> Any:
    """Return the HF config. Raises EngineError."""
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise EngineError(
            f"{model_dir}: no usable model config: {str(e).splitlines()[0]}"
        ) from None


def resolve_dtype(name: str, config: Any, device: str) -> torch.dtype:
    """Resolve "auto": as the model was stored on CPU, bfloat16 elsewhere. Raises EngineError."""
    if name != "auto" and name not in DTYPES:
        raise EngineError(f"model.dtype = {name!r}: must be auto, {', '.join(DTYPES)}")
    return served_dtype(name, config, device)


def build_model(
    config: Any,
    dtype: torch.dtype,
    device: str,
    lora: AdapterSettings | None = None,
    attention: str | None = "sdpa",
) -> torch.nn.Module:
    """Build the model with arbitrary weights (device "meta": with none), and adapters if there are
    any. `attention` None: the implementation of its family, for a model that computes nothing.
    Raises EngineError, ConfigError."""
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except ValueError as e:
        reason = f"cannot be built: {str(e).splitlines()[0]}"
        if type(config) not in AutoModelForCausalLM._model_mapping:
            reason = "not a decoder-only model: transformers has no causal language model for it"
        elif "attention" in str(e) and attention is not None:
            reason = (
                f"transformers has no {attention} attention for this family, which the torch "
                "engine computes with: use rollout.engine = 'vllm'"
            )
        raise EngineError(f"{config.model_type}: {reason}") from None
    if lora is not None:
        add_adapters(model, lora)
        model.to(dtype)
    return model.eval()


def tensor_targets(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Map names to live tensors of all that a version may hold; tied names share one tensor.
    Adapters have the names by which versions are published."""
    return {public_name(n): t for n, t in model.state_dict(keep_vars=True).items()}


def check_fits(
    targets: dict[str, torch.Tensor], tensors: Iterable[TensorSpec], version: int
) -> None:
    """Raise WeightsError unless these tensors give everything in the model exactly one value.

    Persistent buffers too: a router's bias is no parameter. What is not persistent follows from the
    config and is never given. Of tied names (embeddings and lm_head) any one is given.
    """
    given: set[int] = set()
    for spec in tensors:
        target = targets.get(spec.name)
        if target is None:
            raise WeightsError(f"{spec.name}: the model has no such tensor")
        if tuple(target.shape) != tuple(spec.shape):
            raise WeightsError(
                f"{spec.name}: shape {tuple(spec.shape)}, the model has {tuple(target.shape)}"
            )
        if id(target) in given:
            raise WeightsError(f"{spec.name}: given under another name, too")
        given.add(id(target))
    missing = [name for name, target in targets.items() if id(target) not in given]
    if missing:
        raise WeightsError(
            f"{missing[0]}: missing from version {version} ({len(missing)} tensors are)"
        )


class Layouts:
    """The layouts of successive versions. They hardly differ: a layout equal to the last one is
    neither decoded nor compared with the model again."""

    def __init__(self, targets: dict[str, torch.Tensor] | None = None) -> None:
        """`targets`: of the model that the versions must fit; None: the caller has checked that."""
        self._targets = targets
        self._head = b""  # of the manifest's bytes: all but the digests
        self._tensors: tuple[TensorSpec, ...] = ()

    def read(self, file: VersionFile, base: str = "") -> tuple[TensorSpec, ...]:
        """Verify the manifest of the version and return its tensors. Raises WeightsError if they do
        not fit, or are adapters of another base than that with the digest `base`."""
        encoded = read_encoded(file)
        if self._head and encoded.startswith(self._head):
            require_digest(encoded, file.digest)
            return self._tensors
        manifest = decode(encoded, file.digest)
        if manifest.base != base:
            here = f"what is here is {base[:16]}" if base else "there is none here"
            raise WeightsError(f"adapters of the version {manifest.base[:16] or 'none'}, {here}")
        if self._targets is not None:
            check_fits(self._targets, manifest.tensors, file.policy_version)
        self._tensors = manifest.tensors
        if not base:  # else digests are not the last
            self._head = encoded[: len(encoded) - len(manifest.digests)]
        return self._tensors


class VersionLayouts:
    """The layouts of versions for one model: all of it, or adapters beside a base."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        """`targets`: as `tensor_targets` finds them."""
        adapters = {n: t for n, t in targets.items() if is_adapter(n)}
        self._base = Layouts({n: t for n, t in targets.items() if not is_adapter(n)})
        self._versions = Layouts(adapters) if adapters else self._base

    def read(self, file: VersionFile, base: VersionFile | None = None) -> tuple[TensorSpec, ...]:
        """See `Layouts.read`."""
        return self._versions.read(file, base.digest if base is not None else "")

    def read_base(self, base: VersionFile) -> tuple[TensorSpec, ...]:
        return self._base.read(base)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * text.num_hidden_layers * kv_heads * head_dim * dtype.itemsize


def attention_windows(config: object) -> dict[str, int | None]:
    """Map the attention kinds in the model (transformers' names) to their sliding windows."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return {"full_attention": window}
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise EngineError(
            f'the torch engine has no {sorted(unknown)[0]} layers; use engine = "vllm"'
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def main(folder: Path) -> int:
    """Return the exit status of a process that checks whether the torch engine can compute a model,
    and print the reason where it cannot."""
    try:
        config = read_config(folder)
        build_model(config, torch.float32, "meta")
        attention_windows(config.get_text_config())
    except EngineError as e:
        print(e)
        return UNFIT
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
