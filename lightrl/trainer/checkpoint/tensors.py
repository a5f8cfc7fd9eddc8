"""Reads the tensors of the model in a checkpoint one by one, for exports and evaluations. Imports
torch; daemons must not import this.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from lightrl.adapters import public_name
from lightrl.errors import TrainerError
from lightrl.trainer.checkpoint.layout import Layout
from lightrl.trainer.checkpoint.saved import STATE


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, in the `saved` dtype, to be read in `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    saved: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Reader(FileSystemReader):
    """Reads one checkpoint, and its index once."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint / STATE)
        self.checkpoint = checkpoint
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = super().read_metadata(*args, **kwargs)
        return self._index


def find_tensors(reader: Reader, dtypes: dict[str, str]) -> Iterator[Stored]:
    """Find tensors of these names, to read in these dtypes. Raises TrainerError, one line, if one
    is missing."""
    checkpoint = reader.checkpoint
    try:
        known = reader.read_metadata().state_dict_metadata
    except (OSError, EOFError, RuntimeError, ValueError) as e:
        raise TrainerError(f"{checkpoint / STATE}: cannot be read: {e}") from e
    for name, dtype in dtypes.items():
        entry = known.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            raise TrainerError(f"{checkpoint}: has no tensor {name}")
        yield Stored(name, getattr(torch, dtype), tuple(entry.size), entry.properties.dtype)


def read_tensors(reader: Reader, layer: list[Stored]) -> dict[str, Tensor]:
    """Read them one by one, so that one at a time is in memory in another dtype. Raises
    TrainerError, one line."""
    found: dict[str, Tensor] = {}
    for stored in layer:
        state = {"model": {stored.name: torch.empty(stored.shape, dtype=stored.saved)}}
        try:
            load_state(state, storage_reader=reader, no_dist=True)
        except (RuntimeError, ValueError, CheckpointException) as e:
            what = f"{reader.checkpoint}: {stored.name}"
            raise TrainerError(f"{what} cannot be read: {e}") from e
        found[stored.name] = state["model"].pop(stored.name).to(stored.dtype)
    return found


def read_adapters(checkpoint: Path, layout: Layout) -> dict[str, Tensor]:
    """Read all adapters, under peft's names. Raises TrainerError, one line."""
    reader = Reader(checkpoint)
    tensors = read_tensors(reader, list(find_tensors(reader, layout.dtypes)))
    return {public_name(name): tensor for name, tensor in tensors.items()}
