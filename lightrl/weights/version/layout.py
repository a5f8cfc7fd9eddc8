"""The layout of a version: one flat file, cut into buckets of equal size.

The layout follows from names, shapes and dtypes alone, so that every process can compute it.
Tensors are sorted by name and start at multiples of ALIGNMENT; the bytes between them are zero.
Buckets are slices of the file, wherever tensors begin. Must not import torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated, TypeAlias

from msgspec import Meta

from lightrl.errors import WeightsError
from lightrl.messages.fields import MAX_DIMENSIONS, MAX_NAME, MAX_TENSORS, Count, Word

BUCKET_BYTES = 8 << 20  # the unit of transfer, of verification and of resuming
ALIGNMENT = 64  # bytes; so that views into the file are aligned for every dtype
MAX_BYTES = 1 << 48  # of a version

# torch name without prefix -> bytes of an element
ITEMSIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}

Entry: TypeAlias = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The place of one tensor: `offset` bytes into the file, rows one after the other.

    Example: TensorSpec("model.norm.weight", "float32", (128,), offset=512)
    """

    # HF name of a parameter or a persistent buffer
    name: Annotated[str, Meta(max_length=MAX_NAME)]
    # torch name without prefix: "float32", "bfloat16"
    dtype: Word
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]
    offset: Count

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.itemsize


def plan(entries: Iterable[Entry]) -> tuple[TensorSpec, ...]:
    """Return the tensors of a version in the order of the file. Raises WeightsError for a dtype
    that cannot be served, or a duplicate name."""
    specs: list[TensorSpec] = []
    end = 0
    for name, dtype, shape in sorted(entries):
        if dtype not in ITEMSIZES:
            raise WeightsError(f"{name}: weights of dtype {dtype} cannot be served")
        if specs and specs[-1].name == name:
            raise WeightsError(f"{name}: comes twice")
        spec = TensorSpec(name, dtype, shape, _aligned(end))
        specs.append(spec)
        end = spec.offset + spec.num_bytes
    return tuple(specs)


def num_bytes(tensors: tuple[TensorSpec, ...]) -> int:
    """The size of the file of these tensors."""
    return tensors[-1].offset + tensors[-1].num_bytes if tensors else 0


def check(tensors: tuple[TensorSpec, ...]) -> None:
    """Raises WeightsError unless this is the `plan` of these names, dtypes and shapes. Allocates
    nothing of the sizes that it states."""
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise WeightsError(f"a version with {len(tensors)} tensors")
    previous, end = "", 0
    for i, t in enumerate(tensors):
        if t.dtype not in ITEMSIZES:
            raise WeightsError(f"{t.name[:80]!r}: unknown dtype {t.dtype[:80]!r}")
        if i and t.name <= previous:
            raise WeightsError(f"{t.name[:80]!r}: out of order")
        if t.offset != _aligned(end) or min(t.shape, default=0) < 0:
            raise WeightsError(f"{t.name[:80]!r}: does not lie where it should")
        previous, end = t.name, t.offset + t.num_bytes
        if end > MAX_BYTES:
            raise WeightsError(f"{t.name[:80]!r}: the version is larger than any")
    if end == 0:
        raise WeightsError("a version without a byte")


def num_buckets(size: int) -> int:
    """The number of buckets in a file of `size` bytes."""
    return -(-size // BUCKET_BYTES)


def bucket_range(index: int, size: int) -> tuple[int, int]:
    """The (start, end) of a bucket in a file of `size` bytes."""
    return index * BUCKET_BYTES, min((index + 1) * BUCKET_BYTES, size)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
