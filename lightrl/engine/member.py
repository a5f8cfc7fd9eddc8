"""An engine's worker as a member of a broadcast group: weights straight from the training ranks.

Owns the group that this process is in, one at a time, and the proof that what it got is what the
ranks hold. Where the tensors go is the engine's business. Imports torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lightrl.engine.base import JoinGroup, ReceiveWeights
from lightrl.errors import WeightsError
from lightrl.system.addresses import split_address
from lightrl.weights.broadcast.group import Group, form
from lightrl.weights.broadcast.proof import Proof
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.layout import TensorSpec


class Member:
    def __init__(self) -> None:
        self._group: Group | None = None
        self._name = ""

    def join(self, command: JoinGroup, worker: int, device: torch.device | str) -> None:
        """Leaves the group before. `worker`: the number of this worker among its engine's, which
        are members one after the other. Raises WeightsError, at the latest after the time limit."""
        if self._group is not None:
            self._group.abandon("another group has formed")
            self._group = None
        address = split_address(command.address)
        if address is None:
            raise WeightsError(f"{command.address}: not an address")
        place = replace(command.place, rank=command.place.rank + worker)
        self._group = form(address, place, device if place.backend == "nccl" else "cpu")
        self._name = place.name

    def receive(
        self, command: ReceiveWeights, tensors: Sequence[TensorSpec]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, in order, and after the last one the proof: whoever has taken them all
        serves them only if this ends without WeightsError."""
        if self._group is None or self._name != command.group:
            raise WeightsError("broadcast: not a member of this group")
        proof = Proof(command.seed, self._group.device)
        yield from receive(self._group, tensors, proof)
        if proof.sums() != command.sums:
            raise WeightsError(
                f"broadcast: version {command.file.policy_version} is not what the ranks sent"
            )

    def load(
        self,
        command: ReceiveWeights,
        tensors: Sequence[TensorSpec],
        targets: dict[str, torch.Tensor],
    ) -> None:
        """Copies all tensors to where they are served from."""
        for name, tensor in self.receive(command, tensors):
            targets[name].copy_(tensor)
