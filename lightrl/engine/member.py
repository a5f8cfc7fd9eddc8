"""An engine's worker as a member of a broadcast group: weights straight from the training ranks.

Owns the group that this process is in, one at a time, and the sums over what it got. Where the
tensors go, and whether the sums are right, is the engine's business. Imports torch.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from lightrl.engine.base import JoinGroup, ReceiveWeights
from lightrl.errors import WeightsError
from lightrl.system.addresses import split_address
from lightrl.weights.broadcast.group import Group, form
from lightrl.weights.broadcast.proof import Proof, proof_seed
from lightrl.weights.broadcast.rendezvous import Unreachable
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.layout import TensorSpec

NO_WAY = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


class Member:
    def __init__(self) -> None:
        self._group: Group | None = None
        self._name = ""

    def join(self, command: JoinGroup, worker: int, device: torch.device | str) -> None:
        """Leaves the group before. `worker`: the number of this worker among its engine's, which
        are members one after the other. Raises WeightsError, at the latest after the time limit;
        Unreachable only if nobody answers at the address until then, or there is no way to it."""
        self.leave("another group forms")
        address = split_address(command.address)
        if address is None:
            raise WeightsError(f"{command.address}: not an address")
        place = replace(command.place, rank=command.place.rank + worker)
        try:
            self._group = form(address, place, device if place.backend == "nccl" else "cpu")
        except Unreachable as e:
            if not _is_out_of_reach(e.__cause__):
                raise WeightsError(str(e)) from e
            raise
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
        is_unwanted: Callable[[], bool] | None,
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
        is_unwanted: Callable[[], bool],
    ) -> tuple[int, ...]:
        """Copies all tensors to where they are served from; the sums over them."""
        sums: list[int] = []
        for name, tensor in self.receive(command, tensors, sums, is_unwanted):
            targets[name].copy_(tensor)
        return tuple(sums)


def _is_out_of_reach(cause: BaseException | None) -> bool:
    """Whether it would be so for every group of this trainer. Who is refused, or cut off, has
    reached the machine, where nobody listens any more when a group is over; and who lacks a
    descriptor has not tried."""
    if isinstance(cause, TimeoutError):  # ETIMEDOUT, too
        return True
    return isinstance(cause, OSError) and cause.errno in NO_WAY
