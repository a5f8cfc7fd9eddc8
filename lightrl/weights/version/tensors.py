"""Versions as torch tensors: an engine maps the file, nothing is copied.

Imports torch; daemons must not import this.
"""

import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from lightrl.errors import WeightsError
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.write import TensorBytes, write_version

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE; Python has no name for it


def read_tensors(file: VersionFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a version in the order of the file, see `map_tensors`; the manifest is
    verified. Raises WeightsError."""
    return map_tensors(file, read_manifest(file).tensors)


def map_tensors(
    file: VersionFile, tensors: Iterable[TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into the file, on the CPU, valid as long as one of them is referred to. The process
    that verified the file has it locked against writers. Raises WeightsError.

    Writing to a view copies a page for this process; the file does not change.
    """
    flat = torch.frombuffer(_mapped(file), dtype=torch.uint8)  # before the first one is needed

    def view(spec: TensorSpec) -> tuple[str, torch.Tensor]:
        data = flat[spec.offset : spec.offset + spec.num_bytes]
        return spec.name, data.view(getattr(torch, spec.dtype)).view(spec.shape)

    return map(view, tensors)


def write_tensors(
    path: Path, policy_version: int, named: Iterable[tuple[str, torch.Tensor]]
) -> VersionFile:
    """Write HF-named tensors (any device) as a version."""
    tensors: list[TensorBytes] = []
    for name, tensor in named:
        flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        shape = tuple(tensor.shape)
        tensors.append(TensorBytes(name, dtype_name(tensor.dtype), shape, memoryview(flat)))
    return write_version(path, policy_version, tensors)


def served_dtype(name: str, config: Any, device: str) -> torch.dtype:
    """The dtype of served weights for a value of `model.dtype`. "auto": that of the model's HF
    config on a CPU, float32 without one; bfloat16 on other devices."""
    if name == "auto":
        stored = getattr(config, "dtype", None)
        return (stored or torch.float32) if device == "cpu" else torch.bfloat16
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Example: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _mapped(file: VersionFile) -> mmap.mmap:
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size != file.num_bytes:
                raise WeightsError(f"{file.path}: {size} bytes, not {file.num_bytes}")
            # writable, or torch warns; no memory is reserved for that
            access = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(descriptor, size, mmap.MAP_PRIVATE | _NO_RESERVE, access)
        finally:
            os.close(descriptor)
    except OSError as e:
        raise WeightsError(f"{file.path}: cannot be mapped: {e.strerror}") from e
