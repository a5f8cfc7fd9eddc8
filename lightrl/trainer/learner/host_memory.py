"""Memory of the host for tensors of a device.

A tensor that is away is the same object as before, of an empty storage, so that FSDP and optimizers
keep their references; nothing may compute with it until it is fetched.

The memory is one file that the kernel keeps in memory, allocated once. On CUDA it is mapped and
pinned, and copies run beside the computation. On a processor, whose device and host have one
memory, it is written and read without being mapped, so that what is away is not resident.
"""

import ctypes
import logging
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightrl.system import pages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of the file. `pinned`: mapped, uint8."""

    offset: int
    num_bytes: int
    pinned: Tensor | None = None


class HostMemory:
    """Holds whole storages of tensors of one device; other tensors stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file = os.memfd_create("lightrl-parked")
        weakref.finalize(self, os.close, self._file)
        self._num_bytes = 0  # of the file
        self._away: dict[int, tuple[torch.UntypedStorage, _Place]] = {}
        self._free: dict[int, list[_Place]] = defaultdict(list)  # by size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to the host; those that share a storage go together.

        Raises OSError where the host has no memory for them.
        """
        self.wait()
        storages = [s for s in self._storages(tensors) if s.size()]
        for storage in storages:
            place = self._place(storage.size())
            self._copy(storage, place, is_out=True)
            self._away[storage._cdata] = storage, place
            if self._stream is None:  # at most one storage is in memory twice
                if problem := pages.forget(storage.data_ptr(), storage.size()):
                    logger.warning("%d bytes stay resident: %s", storage.size(), problem)
                storage.resize_(0)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()
            for storage in storages:
                storage.resize_(0)

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors that are away."""
        found = [self._away.get(storage._cdata) for storage in self._storages(tensors)]
        return sum(entry[1].num_bytes for entry in found if entry)

    def release(self) -> None:
        """Return memory that is free to the device or the kernel."""
        if self._stream is not None:
            torch.cuda.empty_cache()
        else:
            pages.trim()

    def fetch(self, tensors: Iterable[Tensor], beside: bool = False) -> None:
        """Move tensors back to the device; `beside` other work of the device: `wait` before they
        are used."""
        found = [
            self._away.pop(s._cdata) for s in self._storages(tensors) if s._cdata in self._away
        ]
        for storage, place in found:  # memory of the stream that will use it
            storage.resize_(place.num_bytes)
        if self._stream is not None and beside:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._read(found)
        else:
            self._read(found)

    def wait(self) -> None:
        """Make later computation wait for all that was fetched."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Forget tensors that are away and never used again."""
        for storage in self._storages(tensors):
            if (found := self._away.pop(storage._cdata, None)) is not None:
                self._free[found[1].num_bytes].append(found[1])

    def view(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or, while it is away, one of the same values on the host;
        values written there are fetched later."""
        local = local_part(tensor)
        if (found := self._away.get(local.untyped_storage()._cdata)) is None:
            return tensor
        place = found[1]
        data = place.pinned if place.pinned is not None else self._mapped(place)
        here = torch.empty(0, dtype=local.dtype).set_(
            data.untyped_storage(), local.storage_offset(), local.shape, local.stride()
        )
        if not isinstance(tensor, DTensor):
            return here
        # Not by `from_local`: it would move it to the device of the mesh.
        made: Any = DTensor
        return made(here, tensor._spec, requires_grad=False)

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
        """Yield those of the device, each once."""
        known: set[int] = set()
        for tensor in tensors:
            local = local_part(tensor)
            storage = local.untyped_storage()
            if local.device == self._device and storage._cdata not in known:
                known.add(storage._cdata)
                yield storage

    def _place(self, num_bytes: int) -> _Place:
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        place = _Place(self._num_bytes, num_bytes)
        self._num_bytes += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, self._num_bytes)
        if self._stream is None:
            return place
        return _Place(place.offset, num_bytes, _pinned(self._mapped(place)))

    def _mapped(self, place: _Place) -> Tensor:
        size = place.num_bytes
        return torch.frombuffer(mmap.mmap(self._file, size, offset=place.offset), dtype=torch.uint8)

    def _read(self, found: list[tuple[torch.UntypedStorage, _Place]]) -> None:
        for storage, place in found:
            self._copy(storage, place, is_out=False)
            self._free[place.num_bytes].append(place)

    def _copy(self, storage: torch.UntypedStorage, place: _Place, is_out: bool) -> None:
        if place.pinned is not None:
            host = place.pinned.untyped_storage()
            target, source = (host, storage) if is_out else (storage, host)
            target.copy_(source, non_blocking=True)
            return
        array = (ctypes.c_char * place.num_bytes).from_address(storage.data_ptr())
        data, done = memoryview(array).cast("B"), 0
        while done < place.num_bytes:  # the kernel moves 2 GiB at a time
            at = place.offset + done
            if is_out:
                done += os.pwrite(self._file, data[done:], at)
            else:
                done += os.preadv(self._file, [data[done:]], at)


def _pinned(data: Tensor) -> Tensor:
    """Pin the memory of `data`, which CUDA then copies without the processor. torch's own allocator
    of pinned memory takes the next power of two."""
    cudart: Any = torch.cuda.cudart()
    problem = cudart.cudaHostRegister(data.data_ptr(), data.nbytes, 0)
    if int(problem):
        logger.warning("%d bytes of the host cannot be pinned: %s", data.nbytes, problem)
    return data


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(module: nn.Module) -> None:
    """Drop the weights that FSDP has gathered for a pass and keeps until a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
