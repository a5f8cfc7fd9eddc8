"""The tensors that the torch engine computes with, and how a version comes into them.

Owns the check that it fits, and which version adapters are beside. Imports torch.
"""

import torch

from lightrl.adapters import is_adapter
from lightrl.engine.base import ReceiveWeights
from lightrl.engine.checkpoint import Layouts, tensor_targets
from lightrl.engine.member import Member
from lightrl.weights.broadcast.rendezvous import IsUnwanted
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
        """The tensors of a version. Raises WeightsError if they do not fit."""
        return self._layouts.read(file, base)

    def load(
        self, file: VersionFile, tensors: tuple[TensorSpec, ...], base: VersionFile | None
    ) -> None:
        """Copies a version that was checked, and the base if it is another one than before."""
        if base is not None and base.digest != self._base:
            self._base = ""
            self._copy(base, self._layouts.read_base(base))
            self._base = base.digest
        self._copy(file, tensors)

    def receive(
        self, command: ReceiveWeights, tensors: tuple[TensorSpec, ...], is_unwanted: IsUnwanted
    ) -> tuple[int, ...]:
        return self.member.load(command, tensors, self._targets, is_unwanted)

    def _copy(self, file: VersionFile, tensors: tuple[TensorSpec, ...]) -> None:
        for name, tensor in map_tensors(file, tensors):
            self._targets[name].copy_(tensor)


class VersionLayouts:
    """What versions for one model consist of: all of it, or adapters beside a base."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        """`targets`: as `tensor_targets` finds them."""
        adapters = {n: t for n, t in targets.items() if is_adapter(n)}
        self._base = Layouts({n: t for n, t in targets.items() if not is_adapter(n)})
        self._versions = Layouts(adapters) if adapters else self._base

    def read(self, file: VersionFile, base: VersionFile | None = None) -> tuple[TensorSpec, ...]:
        """See `Layouts.read`."""
        return self._versions.read(file, base.digest if base is not None else "")

    def read_base(self, base: VersionFile) -> tuple[TensorSpec, ...]:
        return self._base.read(base)
