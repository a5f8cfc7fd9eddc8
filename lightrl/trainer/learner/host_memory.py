"""Memory of the host for tensors of a device.

A tensor that is away is the same object as before, of an empty storage, so that FSDP and optimizers
keep their references; nothing may compute with it until it is fetched. Its memory on the host is
allocated once; on CUDA it is pinned.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)


class HostMemory:
    """Holds whole storages of tensors of one device; other tensors stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # storages that are away, by identity, each with its bytes on the host
        self._away: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size
        self._is_cuda = device.type == "cuda"

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to the host; those that share a storage go together."""
        storages = [s for s in self._storages(tensors) if s.size()]
        for storage in storages:
            place = self._place(storage.size())
            place.untyped_storage().copy_(storage, non_blocking=True)
            self._away[storage._cdata] = storage, place
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        for storage in storages:
            storage.resize_(0)

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors that are away."""
        found = [self._away.get(storage._cdata) for storage in self._storages(tensors)]
        return sum(entry[1].nbytes for entry in found if entry)

    def fetch(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors back to the device."""
        for storage in self._storages(tensors):
            if (found := self._away.pop(storage._cdata, None)) is not None:
                place = found[1]
                storage.resize_(place.nbytes)
                storage.copy_(place.untyped_storage(), non_blocking=True)
                self._free[place.nbytes].append(place)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Forget tensors that are away and never used again."""
        for storage in self._storages(tensors):
            if (found := self._away.pop(storage._cdata, None)) is not None:
                self._free[found[1].nbytes].append(found[1])

    def view(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or, while it is away, one of the same values on the host;
        values written there are fetched later."""
        local = local_part(tensor)
        if (found := self._away.get(local.untyped_storage()._cdata)) is None:
            return tensor
        here = torch.empty(0, dtype=local.dtype).set_(
            found[1].untyped_storage(), local.storage_offset(), local.shape, local.stride()
        )
        if not isinstance(tensor, DTensor):
            return here
        # Not by `from_local`: it would move it to the device of the mesh.
        made: Any = DTensor
        return made(here, tensor._spec, requires_grad=False)

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
        """Yield those of the device, each once."""
        seen: set[int] = set()
        for tensor in tensors:
            local = local_part(tensor)
            storage = local.untyped_storage()
            if local.device == self._device and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage

    def _place(self, num_bytes: int) -> Tensor:
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        place = torch.empty(num_bytes, dtype=torch.uint8)
        if self._is_cuda:
            # torch's own allocator of pinned memory takes the next power of two
            cudart: Any = torch.cuda.cudart()
            if problem := int(cudart.cudaHostRegister(place.data_ptr(), num_bytes, 0)):
                logger.warning("%d bytes of the host cannot be pinned: %d", num_bytes, problem)
        return place


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(module: nn.Module) -> None:
    """Drop the weights that FSDP has gathered for a pass and keeps until a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
