"""Names and dtypes of a checkpoint's tensors in the model directory, and its small files: enough
for an export without the run, its model directory or a device.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.adapters import is_adapter, peft_file
from lightrl.errors import ProtocolError, TrainerError
from lightrl.trainer.checkpoint.on_disk import LAYOUT_FILE as LAYOUT_FILE
from lightrl.trainer.checkpoint.on_disk import MODEL as MODEL
from lightrl.trainer.model.policy import Policy, shards
from lightrl.weights.version.tensors import dtype_name
from lightrl.wire import from_json, to_json

WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ot", ".onnx"),
    *(".safetensors.index.json", ".bin.index.json", ".lock"),
)


@dataclass(frozen=True)
class Layout:
    """Example: Layout({"model.norm.weight": "bfloat16"})."""

    # of parameters and persistent buffers, tied ones once -> as stored in the model directory
    dtypes: dict[str, str]
    # renamings, joins and splits by transformers when it loaded the model; None: its defaults
    conversions: tuple[str, ...] | None = ()
    # adapter_config.json of peft, if the checkpoint holds adapters alone; "" = the model itself
    adapter: str = ""


def describe(policy: Policy, base: str = "") -> Layout:
    """Describe a policy. No collective. `base`: the model beside adapters."""
    if policy.has_adapters:
        named = policy.module.named_parameters()
        dtypes = {name: dtype_name(p.dtype) for name, p in named if is_adapter(name)}
        return Layout(dtypes, adapter=json.dumps(peft_file(policy.module, base), indent=2))
    ignored = policy.module._keys_to_ignore_on_save or ()
    found = {s.name: dtype_name(s.dtype) for s in shards(policy, is_stored=True)}
    known: Sequence[Any] | None = getattr(policy.module, "_weight_conversions", None)
    conversions = None if known is None else tuple(map(_name_of, known))
    return Layout({n: dtype for n, dtype in found.items() if n not in ignored}, conversions)


def write_description(draft: Path, layout: Layout, model_dir: Path) -> None:
    """Raises OSError."""
    (draft / LAYOUT_FILE).write_bytes(to_json(layout))
    (draft / MODEL).mkdir()
    for file in sorted(model_dir.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, draft / MODEL / file.name)


def read_layout(checkpoint: Path) -> Layout:
    """Raises TrainerError, one line, if the checkpoint is from before there were layouts."""
    try:
        return from_json((checkpoint / LAYOUT_FILE).read_bytes(), Layout)
    except (OSError, ProtocolError) as e:
        raise TrainerError(f"{checkpoint}: cannot be exported: it has no {LAYOUT_FILE}") from e


def set_conversions(checkpoint: Path, module: Any, layout: Layout) -> None:
    """Have `save_pretrained` write the names of the files that the model was loaded from. Raises
    TrainerError if this transformers does not have the conversions."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if layout.conversions is None:
        return
    known = {_name_of(c): c for c in get_model_conversion_mapping(module)}
    if missing := [name for name in layout.conversions if name not in known]:
        raise TrainerError(f"{checkpoint}: this transformers cannot undo {missing[0]}")
    module._weight_conversions = [known[name] for name in layout.conversions]


def _name_of(conversion: Any) -> str:
    patterns = (conversion._original_source_patterns, conversion._original_target_patterns)
    return f"{type(conversion).__name__} {' '.join(patterns[0])} > {' '.join(patterns[1])}"
