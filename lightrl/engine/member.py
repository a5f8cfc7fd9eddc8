"""An engine's worker as a member of a broadcast group: weights straight from the training ranks.

Owns the group that this process is in, one at a time, and the sums over what it got. Where the
tensors go, and whether the sums are right, is the engine's business. Imports torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lightrl.engine.base import ReceiveWeights
from lightrl.errors import WeightsError
from lightrl.system.addresses import split_address
from lightrl.weights.broadcast.group import Group, form
from lightrl.weights.broadcast.proof import Proof, proof_seed
from lightrl.weights.broadcast.rendezvous import IsUnwanted, JoinGroup
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.layout import TensorSpec


class Member:
    def __init__(self) -> None:
        self._group: Group | None = None
        self._name = ""

    def join(self, command: JoinGroup, worker: int, device: torch.device | str) -> None:
        """Leaves the group before. `worker`: the number of this worker among its engine's, which
        are members one after the other. Raises WeightsError, at the latest after the time limit;
        OutOfReach if it is no use to try again at that address."""
        self.leave("another group forms")
        address = split_address(command.address)
        if address is None:
            raise WeightsError(f"{command.address}: not an address")
        place = replace(command.place, rank=command.place.rank + worker)
        self._group = form(address, place, device if place.backend == "nccl" else "cpu")
        self._name = place.name

    def leave(self, why: str) -> None:
        if self._group is not None:
            self._group.abandon(why)
            self._group = None

    def receive(
        self,
        command: ReceiveWeights,
        tensors: Sequence[TensorSpec],
        sums: list[int],
        is_unwanted: IsUnwanted | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, in order; after the last one adds the sums over them to `sums`, which the
        caller compares. Raises WeightsError, and the group is over."""
        if self._group is None or self._name != command.group:
            raise WeightsError("broadcast: not a member of this group")
        seed = proof_seed(command.group, command.file.policy_version)
        proof = Proof(seed, self._group.device)
        yield from receive(self._group, tensors, proof, is_unwanted)
        sums += proof.sums()

    def load(
        self,
        command: ReceiveWeights,
        tensors: Sequence[TensorSpec],
        targets: dict[str, torch.Tensor],
        is_unwanted: IsUnwanted,
    ) -> tuple[int, ...]:
        """Copies all tensors to where they are served from; the sums over them."""
        sums: list[int] = []
        for name, tensor in self.receive(command, tensors, sums, is_unwanted):
            targets[name].copy_(tensor)
        return tuple(sums)
