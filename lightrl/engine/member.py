"""An engine's worker as a member of a broadcast group: weights straight from training rank 0.

Owns the group that this process is in, one at a time. Where the tensors go is the engine's
business. Imports torch.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from lightrl.engine.base import ReceiveWeights
from lightrl.errors import WeightsError
from lightrl.weights.broadcast.group import WorkerGroup, form
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.broadcast.transfer import receive
from lightrl.weights.version.manifest import read_manifest


class Member:
    def __init__(self) -> None:
        self._group: WorkerGroup | None = None

    def leave(self, why: str) -> None:
        if self._group is not None:
            self._group.abort(why)
            self._group = None

    def receive(
        self,
        command: ReceiveWeights,
        worker: int,
        device: torch.device | str,
        is_unwanted: IsUnwanted | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, in order; joins the group first unless this is the one at hand.

        `worker`: the number of this worker among its engine's. Raises WeightsError, and the group
        is over; which tensors the file must have, the caller has checked.
        """
        place = command.membership.group
        if self._group is None or self._group.name != place.name:
            self.leave("another group forms")
            mine = replace(command.membership, group=replace(place, rank=place.rank + worker))
            on = device if place.backend == "nccl" else "cpu"
            self._group = form(mine, on, is_unwanted=is_unwanted)
        if self._group.over is not None:
            raise WeightsError(f"broadcast: {self._group.over}")
        yield from receive(self._group, read_manifest(command.file), is_unwanted)
