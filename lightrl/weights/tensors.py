"""Versions as torch tensors: what a training rank writes and an engine loads.

Imports torch; daemons must not import this.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from lightrl.errors import WeightsError
from lightrl.messages import Manifest
from lightrl.weights import manifest as m


def write_tensors(
    path: Path, policy_version: int, named: Iterable[tuple[str, torch.Tensor]]
) -> Manifest:
    """Writes HF-named tensors (any device) as a version and returns its manifest."""

    def as_bytes() -> Iterator[m.TensorBytes]:
        for name, tensor in named:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            data: Any = flat.numpy()
            yield m.TensorBytes(
                name, dtype_name(tensor.dtype), tuple(tensor.shape), memoryview(data)
            )

    return m.write_version(path, policy_version, as_bytes())


def read_tensors(path: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version's file, on the CPU; a bucket is verified before a tensor of it is
    given out.

    When the iterator ends, every byte of the version has been read and its digest proved equal to
    `manifest.digest`. Raises WeightsError otherwise.
    """
    m.verify(manifest)
    specs = iter(manifest.tensors)
    spec = next(specs, None)
    for i, data in enumerate(m.read_buckets(path, manifest)):
        bucket = torch.frombuffer(data, dtype=torch.uint8)
        while spec is not None and spec.bucket == i:
            dtype = getattr(torch, spec.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise WeightsError(f"{spec.name}: unknown dtype {spec.dtype!r}")
            size = dtype.itemsize
            for n in spec.shape:
                size *= n
            if spec.offset + size > len(data):
                raise WeightsError(f"{spec.name}: lies outside bucket {i}")
            yield spec.name, bucket[spec.offset : spec.offset + size].view(dtype).view(spec.shape)
            spec = next(specs, None)
    if spec is not None:
        raise WeightsError(f"{spec.name}: its bucket {spec.bucket} does not exist")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
