"""The tensors that the torch engine computes with, and how a version is loaded into them.

Owns which base of adapters is loaded, and the release of their memory while the engine sleeps.
Imports torch.
"""

import torch

from lightrl.engine.base import ReceiveWeights
from lightrl.engine.member import Member
from lightrl.engine.model_dir import VersionLayouts, tensor_targets
from lightrl.system.process import trim
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import map_tensors


class LiveTensors:
    def __init__(self, model: torch.nn.Module) -> None:
        self.member = Member()
        self._targets = tensor_targets(model)
        self._layouts = VersionLayouts(self._targets)
        self._base = ""  # the digest of what adapters are beside, once it is here

    def check(self, file: VersionFile, base: VersionFile | None) -> tuple[TensorSpec, ...]:
        """Return the tensors of a version. Raises WeightsError if they do not fit."""
        return self._layouts.read(file, base)

    def load(
        self, file: VersionFile, tensors: tuple[TensorSpec, ...], base: VersionFile | None
    ) -> None:
        """Copy a version that was checked, and the base if it is another one than before."""
        if base is not None and base.digest != self._base:
            self._base = ""
            self._copy(base, self._layouts.read_base(base))
            self._base = base.digest
        self._copy(file, tensors)

    def receive(
        self, command: ReceiveWeights, device: torch.device | str, is_unwanted: IsUnwanted
    ) -> None:
        """Copy a version that was checked, as it arrives by broadcast."""
        for name, tensor in self.member.receive(command, 0, device, is_unwanted):
            self._targets[name].copy_(tensor)

    def give_back(self) -> int:
        """Free the memory of all tensors, which remain as objects, and return its bytes."""
        num_bytes = 0
        for tensor in self._targets.values():
            storage = tensor.untyped_storage()  # tied names share one
            num_bytes += storage.nbytes()
            storage.resize_(0)
        self._base = ""
        _return_to_system()
        return num_bytes

    def take_back(self) -> None:
        """Allocate all of them, with arbitrary values. Raises RuntimeError if there is no room."""
        for tensor in self._targets.values():
            num_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
            storage = tensor.untyped_storage()
            if storage.nbytes() < num_bytes:
                storage.resize_(int(num_bytes))

    def _copy(self, file: VersionFile, tensors: tuple[TensorSpec, ...]) -> None:
        for name, tensor in map_tensors(file, tensors):
            self._targets[name].copy_(tensor)


def _return_to_system() -> None:
    """Return freed memory to the system: allocators keep it for this process alone."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    trim()
