"""Exports a checkpoint as a model directory that transformers and vLLM read: safetensors, config,
tokenizer. One file of it is in memory at a time. Needs no device, no run and no model directory.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightrl.adapters import PREFIX
from lightrl.errors import TrainerError
from lightrl.model_files import (
    ADAPTER_CONFIG,
    ADAPTERS,
    WEIGHTS_INDEX,
    weight_files,
    weights_folder,
)
from lightrl.system import files
from lightrl.trainer.checkpoint.contents import (
    Reader,
    Stored,
    find_tensors,
    read_adapters,
    read_tensors,
)
from lightrl.trainer.checkpoint.layout import (
    MODEL,
    Layout,
    Reverter,
    model_of,
    read_layout,
    reverter,
)


def export(
    checkpoint: Path,
    folder: Path,
    shard_bytes: int,
    revert: Reverter | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Export to `folder`, which must not exist: it appears whole or not at all.

    A file is larger than `shard_bytes` only if it is one layer. `revert`: of the model, where it is
    loaded. Raises OSError, or TrainerError in one line, also when it is not wanted any more.
    """
    layout = read_layout(checkpoint)
    if layout.adapter:
        with _whole(folder) as draft:
            _write_adapters(checkpoint, draft, layout)
        return
    if revert is None and layout.conversions != ():
        revert = reverter(model_of(checkpoint, layout))
    reader = Reader(checkpoint)
    parts = list(_parts(find_tensors(reader, layout.dtypes), shard_bytes))
    with _whole(folder) as draft:
        weight_map: dict[str, str] = {}
        for index, part in enumerate(parts, start=1):
            number = f"-{index:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            file = f"model{number}.safetensors"
            named: dict[str, Tensor] = {}
            for layer in part:
                if not is_wanted():
                    raise TrainerError("given up: the next checkpoint is due")
                tensors = read_tensors(reader, layer)
                named |= revert(tensors) if revert is not None else tensors
            _write(draft / file, named)
            weight_map |= dict.fromkeys(named, file)
            del named, tensors
        size = sum(stored.num_bytes for part in parts for layer in part for stored in layer)
        _finish(draft, weight_map if len(parts) > 1 else {}, size, checkpoint / MODEL)


def merge(checkpoint: Path, folder: Path) -> None:
    """Export the model beside adapters, with them added to it, in its dtypes and files. Raises
    OSError, LightRLError."""
    layout = read_layout(checkpoint)
    if not layout.adapter:
        raise TrainerError(f"{checkpoint}: has no adapters that could be merged")
    config = json.loads(layout.adapter)
    base = weights_folder(config["base_model_name_or_path"])
    left = read_adapters(checkpoint, layout)
    with _whole(folder) as draft:
        _finish(draft, {}, 0, checkpoint / MODEL)
        for path in weight_files(base):
            tensors = load_file(path)
            for name in tensors:
                layer = name.removesuffix(".weight")
                a = left.pop(f"{PREFIX}{layer}.lora_A.weight", None)
                b = left.pop(f"{PREFIX}{layer}.lora_B.weight", None)
                if a is not None and b is not None:
                    added = b @ a * (config["lora_alpha"] / config["r"])
                    tensors[name] = (tensors[name].float() + added).to(tensors[name].dtype)
            _write(draft / path.name, tensors)
        index = base / WEIGHTS_INDEX
        if index.is_file():
            shutil.copyfile(index, draft / WEIGHTS_INDEX)
            files.sync(draft / WEIGHTS_INDEX)
        if left:
            layer = next(iter(left)).removeprefix(PREFIX).partition(".lora_")[0]
            raise TrainerError(f"{base}: has no {layer}.weight, to which an adapter belongs")


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Yield a draft that is renamed to `folder`, durably, if nothing is raised."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        yield draft
        draft.rename(folder)
        files.sync(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_adapters(checkpoint: Path, draft: Path, layout: Layout) -> None:
    """Write them as peft does, with the tokenizer. Without config.json, which means a model."""
    _write(draft / ADAPTERS, read_adapters(checkpoint, layout))
    files.write_whole(draft / ADAPTER_CONFIG, f"{layout.adapter}\n".encode())
    _finish(draft, {}, 0, checkpoint / MODEL, but=("config.json", "generation_config.json"))


def _parts(stored: Iterator[Stored], shard_bytes: int) -> Iterator[list[list[Stored]]]:
    """Divide them into files. Layers stay together: transformers joins and splits within them."""
    layers: dict[str, list[Stored]] = {}
    for tensor in stored:
        layers.setdefault(_layer(tensor.name), []).append(tensor)
    part: list[list[Stored]] = []
    num_bytes = 0
    for layer in layers.values():
        size = sum(tensor.num_bytes for tensor in layer)
        if part and num_bytes + size > shard_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(layer)
        num_bytes += size
    if part:
        yield part


def _layer(name: str) -> str:
    """Example: _layer("model.layers.7.mlp.up_proj.weight") == "model.layers.7"."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else name


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, {"format": "pt"})
    except SafetensorError as e:
        if number := re.search(r"\(os error (\d+)\)", str(e)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from e
        raise TrainerError(f"{path}: {str(e).splitlines()[0]}") from e
    path.chmod(0o644)  # safetensors writes files that only their owner can read
    files.sync(path)


def _finish(
    draft: Path,
    weight_map: dict[str, str],
    num_bytes: int,
    model: Path,
    but: tuple[str, ...] = (),
) -> None:
    """Write all but the weights. transformers' own `config.json` would name the dtype of the master
    weights."""
    for file in sorted(path for path in model.iterdir() if path.name not in but):
        shutil.copyfile(file, draft / file.name)
        files.sync(draft / file.name)
    if weight_map:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files.write_whole(draft / WEIGHTS_INDEX, text.encode())
    files.sync(draft)
