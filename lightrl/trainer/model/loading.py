"""Loads a model from its files, tensor by tensor: no rank holds more than its share and one tensor.

Names and tensors of the files are mapped as transformers does: renamings, experts joined. Three
steps, between which a module can be changed: `build` (no memory), `shard` of `sharding`, `fill`.
"""

import logging
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lightrl.adapters import initial, is_adapter, public_name
from lightrl.errors import TrainerError
from lightrl.model_files import stored_tensors
from lightrl.trainer.model.sharding import row_range

logger = logging.getLogger(__name__)

# what was read of a file stays in memory while it is mapped: remap it after so much
MAPPED_BYTES = 64 << 20
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


class Source:
    """Names in the files of one or several values of the module, and the transform between them."""

    def __init__(self, transform: WeightRenaming | WeightConverter) -> None:
        self.transform: Any = transform
        self.keys: list[tuple[str, str]] = []  # name in the files, its pattern in the transform

    @property
    def is_merged(self) -> bool:
        """Whether each row of the value is a tensor in the files: experts."""
        operations = getattr(self.transform, "operations", ())
        return any(isinstance(op, MergeModulelist) and op.dim == 0 for op in operations)


def build(config: Any) -> PreTrainedModel:
    """Build the model on the meta device, in float32 and in evaluation mode. Raises ValueError, or
    another error of its family, if `config` is not that of a causal model."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    return module.eval()


class Files:
    """The safetensors files of a model directory: names, dtypes, and rows of tensors."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError if files are missing, TrainerError if they are quantised."""
        self.folder = model_dir
        self.dtypes: dict[str, torch.dtype] = {}
        self._paths: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        self._num_bytes = 0  # read since it was mapped
        for name, (path, entry) in stored_tensors(model_dir).items():
            self._paths[name] = path
            if (kind := entry.get("dtype")) not in DTYPES:
                raise TrainerError(
                    f"{model_dir}: {name} is quantised ({kind}); use a model in bfloat16 or float32"
                )
            self.dtypes[name] = DTYPES[kind]

    def __iter__(self) -> Iterator[str]:
        """Iterate in the order of the numbers of experts and layers."""
        return iter(sorted(self._paths, key=dot_natural_key))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened(self._paths[name]).get_slice(name).get_shape())

    def read(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Read the rows [first, end) of a tensor, or all of it: a view of the mapped file."""
        file = self._opened(self._paths[name])
        if end is None:
            tensor = file.get_tensor(name)
        elif first == end:
            shape = self.shape(name)
            return torch.empty((0, *shape[1:]), dtype=self.dtypes[name])
        else:
            tensor = file.get_slice(name)[first:end]
        self._num_bytes += tensor.nbytes
        return tensor

    def close(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
        self._open = None

    def _opened(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path or self._num_bytes > MAPPED_BYTES:
            self.close()
            try:
                file = safe_open(path, "pt").__enter__()
            except (OSError, SafetensorError) as e:
                raise TrainerError(f"{path}: cannot be read: {e}") from None
            self._open, self._num_bytes = (path, file), 0
        return self._open[1]


def plan(module: PreTrainedModel, files: Files) -> dict[str, Source]:
    """Map names in the module, the first one of several, to their sources. The module keeps the
    conversions, for exports."""
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    targets = module.state_dict(keep_vars=True)
    prefix = module.base_model_prefix
    sources: dict[str, Source] = {}
    for key in files:
        name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
        if name not in targets and key in targets:
            name, pattern = key, None
        if name not in targets:
            continue
        if name not in sources:
            renaming = WeightRenaming(key, name)
            sources[name] = Source(renaming if pattern is None else deepcopy(by_pattern[pattern]))
        sources[name].keys.append((key, key if pattern is None else pattern))
    setattr(module, "_weight_conversions", [t for t in mapping if t.was_used()])  # noqa: B010
    return sources


def stored_dtypes(
    module: PreTrainedModel, files: Files, sources: dict[str, Source]
) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter and persistent buffer in the files; tied ones have the
    same."""
    targets = module.state_dict(keep_vars=True)
    found: dict[int, torch.dtype] = {}
    for name, source in sources.items():
        found[id(targets[name])] = files.dtypes[source.keys[0][0]]
    usual = max(found.values(), key=list(found.values()).count, default=torch.float32)
    return {name: found.get(id(tensor), usual) for name, tensor in targets.items()}


def require_complete(module: PreTrainedModel, files: Files, sources: dict[str, Source]) -> None:
    """Raise TrainerError, one line, if parameters are missing or have another shape, or if tied
    ones differ."""
    targets = module.state_dict(keep_vars=True)
    parameters = {id(p): name for name, p in module.named_parameters()}
    given = {id(targets[name]) for name in sources}
    for source in sources.values():  # of several values only the first is a key
        if not isinstance(source.transform, WeightRenaming) and not source.is_merged:
            given |= {id(t) for n, t in targets.items() if _matches(source.transform, n)}
    ignored = module._keys_to_ignore_on_load_missing or ()
    missing = [
        name
        for number, name in parameters.items()
        if number not in given and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if missing:
        raise TrainerError(
            f"{files.folder}: {len(missing)} tensors of a {type(module).__name__} are not in its "
            f"files: {missing[0]}"
        )
    for name, source in sources.items():
        key, shape = source.keys[0][0], tuple(targets[name].shape)
        if isinstance(source.transform, WeightRenaming) and files.shape(key) != shape:
            raise TrainerError(
                f"{files.folder}: {key} has shape {files.shape(key)}, its config.json says {shape}"
            )
    for one, other in module.all_tied_weights_keys.items():
        if one in sources and other in sources and not _equal(files, sources[one], sources[other]):
            raise TrainerError(
                f"{files.folder}: config.json ties {one} to {other}, but they differ in its files; "
                "set tie_word_embeddings to false there"
            )


def fill(module: PreTrainedModel, files: Files, sources: dict[str, Source]) -> None:
    """Read this rank's part of each tensor, and compute what no file holds: frequencies of rotary
    embeddings. The module has memory of arbitrary values."""
    targets = {public_name(n): t for n, t in module.state_dict(keep_vars=True).items()}
    given: set[int] = set()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_adapter(name):
                _put(parameter, initial(name, tuple(parameter.shape)), is_merged=False)
                given.add(id(parameter))
        for name, source in sources.items():
            for part, value in _values(files, source, name, targets[name]).items():
                _put(targets[part], value, source.is_merged)
                given.add(id(targets[part]))
    files.close()
    _compute_the_rest(module, given)


def _values(files: Files, source: Source, name: str, target: Tensor) -> dict[str, Tensor]:
    """Return the values of a source; only this rank's rows, where rows are tensors."""
    if isinstance(source.transform, WeightRenaming):
        return {name: _Rows(files, source.keys[0][0])}  # pyright: ignore[reportReturnType]
    transform = source.transform
    first, end = row_range(target)
    numbers: dict[str, int] = {}
    for key, pattern in source.keys:
        number = numbers[pattern] = numbers.get(pattern, -1) + 1
        if not source.is_merged or first <= number < end:
            read: Callable[[], Tensor] = partial(files.read, key)
            transform.add_tensor(name, key, pattern, read)
    if not transform.collected_tensors:
        return {}
    made = transform.convert(name, config=None)
    return {part: v[0] if isinstance(v, list) else v for part, v in made.items()}


class _Rows:
    """A tensor of the files, whose rows are read later."""

    def __init__(self, files: Files, key: str) -> None:
        self.files, self.key = files, key


def _put(target: Tensor, value: "Tensor | _Rows", is_merged: bool) -> None:
    first, end = row_range(target)
    local = target.to_local() if isinstance(target, DTensor) else target
    is_part = isinstance(target, DTensor)
    if isinstance(value, _Rows):
        key = value.key
        value = value.files.read(key, first, end) if is_part else value.files.read(key)
    elif is_part and not is_merged:
        value = value[first:end]
    local.copy_(value)


def _compute_the_rest(module: PreTrainedModel, given: set[int]) -> None:
    """Initialize the rest by the code of the family, as transformers does."""
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        for tensor in own:
            setattr(tensor, "_is_hf_initialized", id(tensor) in given)  # noqa: B010
        is_given = all(id(tensor) in given for tensor in own)
        setattr(part, "_is_hf_initialized", is_given)  # noqa: B010
    module.initialize_weights()


def _matches(transform: Any, name: str) -> bool:
    return any(pattern.replace("\\", "") in name for pattern in transform.target_patterns)


def _equal(files: Files, one: Source, other: Source) -> bool:
    (a, _), (b, _) = one.keys[0], other.keys[0]
    if files.shape(a) != files.shape(b):
        return False
    num_rows = files.shape(a)[0]
    step = max(1, num_rows // 64)
    pieces = [(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]
    return all(torch.equal(files.read(a, *piece), files.read(b, *piece)) for piece in pieces)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, on the meta device; buffers keep their dtype."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def cast_as_stored(module: nn.Module, stored: dict[str, torch.dtype]) -> None:
    """Cast each parameter to its dtype in the files."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(stored[name])


def adapter_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """As `stored_dtypes`, for adapters."""
    return {public_name(n): p.dtype for n, p in module.named_parameters() if is_adapter(n)}
