"""Exports a checkpoint as a model directory that transformers and vLLM read: safetensors, config,
tokenizer. The model is in memory meanwhile. Needs no device, no run and no model directory.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from lightrl.adapters import PREFIX
from lightrl.errors import TrainerError, first_line
from lightrl.model_files import (
    ADAPTER_CONFIG,
    ADAPTERS,
    WEIGHTS_INDEX,
    weight_files,
    weights_folder,
)
from lightrl.system import files
from lightrl.trainer.checkpoint.contents import read_adapters, read_model
from lightrl.trainer.checkpoint.layout import MODEL, read_layout, set_conversions

OF_A_MODEL = ("config.json", "generation_config.json")  # with adapters they would mean a model


def export(
    checkpoint: Path,
    folder: Path,
    shard_bytes: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Export to `folder`, which must not exist: it appears whole or not at all. No file is larger
    than `shard_bytes`, unless it is one tensor.

    Raises OSError, or TrainerError in one line, also when it is not wanted any more.
    """
    layout = read_layout(checkpoint)
    if layout.adapter:
        with _whole(folder) as draft:
            _write(draft / ADAPTERS, read_adapters(checkpoint, layout))
            (draft / ADAPTER_CONFIG).write_text(f"{layout.adapter}\n")
            _copy_small_files(checkpoint, draft, but=OF_A_MODEL)
        return

    def cast(module: Any) -> None:
        for name, tensor in module.state_dict(keep_vars=True).items():
            if name in layout.dtypes:
                tensor.data = tensor.data.to(getattr(torch, layout.dtypes[name]))

    def require_wanted() -> None:
        if not is_wanted():
            raise TrainerError("given up: the next checkpoint is due")

    require_wanted()
    disable_progress_bar()
    module = read_model(checkpoint, cast)
    set_conversions(checkpoint, module, layout)
    require_wanted()
    with _whole(folder) as draft:
        module.save_pretrained(draft, max_shard_size=shard_bytes)
        for name in OF_A_MODEL:  # those of this release of transformers
            (draft / name).unlink(missing_ok=True)
        _copy_small_files(checkpoint, draft)


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
        _copy_small_files(checkpoint, draft)
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
        for path in draft.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner can read
            files.sync(path)
        files.sync(draft)
        draft.rename(folder)
        files.sync(folder.parent)
    except SafetensorError as e:
        shutil.rmtree(draft, ignore_errors=True)
        if number := re.search(r"\(os error (\d+)\)", str(e)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from e
        raise TrainerError(f"{folder}: {first_line(e)}") from e
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})


def _copy_small_files(checkpoint: Path, draft: Path, but: tuple[str, ...] = ()) -> None:
    for file in (checkpoint / MODEL).iterdir():
        if file.name not in but:
            shutil.copyfile(file, draft / file.name)
