"""A version from bytes in memory: for emulated trainers and tests.

Ranks use `publish/publisher.py`. Must not import torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lightrl.weights.version.layout import num_bytes, plan
from lightrl.weights.version.manifest import (
    Manifest,
    VersionFile,
    encode,
    finish_version,
    hash_buckets,
)

# (bytes, where in the version)
Write: TypeAlias = Callable[[memoryview, int], None]


@dataclass(frozen=True)
class TensorBytes:
    """One tensor of a version that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_version(path: Path, policy_version: int, tensors: Iterable[TensorBytes]) -> VersionFile:
    """Write a version to `path` and its manifest beside it. Raises WeightsError, OSError."""
    flat, encoded = flatten(tensors)
    path.write_bytes(flat)
    return finish_version(path, policy_version, len(flat), encoded)


def flatten(tensors: Iterable[TensorBytes]) -> tuple[bytearray, bytes]:
    """Return the bytes of a version's file, and those of its manifest. Raises WeightsError."""
    given = {t.name: t for t in tensors}
    specs = plan((t.name, t.dtype, t.shape) for t in given.values())
    size = num_bytes(specs)
    flat = bytearray(size)
    for spec in specs:
        flat[spec.offset : spec.offset + spec.num_bytes] = given[spec.name].data.cast("B")
    return flat, encode(Manifest(specs, size, hash_buckets(memoryview(flat))))
