"""Training rank 0 as the sender of broadcasts: the version that it has published, to engines.

Owns the group that this rank is in, one at a time. Sends from the version's file, which holds what
is served, byte for byte; the trainer keeps the file meanwhile. A failure ends the group, never the
rank: engines pull instead. Imports torch.
"""

import logging
from dataclasses import replace
from typing import Any

import torch

from lightrl.errors import LightRLError, WeightsError, first_line
from lightrl.system.addresses import join_address
from lightrl.trainer.protocol import Done, OpenGroup, SendWeights
from lightrl.weights.broadcast.group import WorkerGroup, form, listen
from lightrl.weights.broadcast.membership import IsUnwanted, Membership
from lightrl.weights.broadcast.transfer import send
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.tensors import map_tensors

logger = logging.getLogger(__name__)

# Errors of torch, files and devices, e.g. out of memory, after which the rank continues.
OF_TORCH = (OSError, RuntimeError, ValueError, MemoryError)


class BroadcastSender:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._opened: tuple[Membership, Any] | None = None  # the next group, and its store
        self._group: WorkerGroup | None = None
        self._name = ""

    def perform(
        self, step: int, command: OpenGroup | SendWeights, is_unwanted: IsUnwanted | None = None
    ) -> Done:
        """Carry out the command; give up as soon as it `is_unwanted`."""
        try:
            if isinstance(command, OpenGroup):
                return Done(step, address=self._open(command))
            self._send(command, is_unwanted)
            return Done(step)
        except (LightRLError, *OF_TORCH) as e:
            if not isinstance(e, LightRLError):
                logger.exception("no broadcast")
            reason = first_line(e)
            self.leave(reason.removeprefix("broadcast: "))
            return Done(step, reason)

    def leave(self, why: str) -> None:
        """Leave the group, or stop listening for one."""
        group, self._group, self._opened = self._group, None, None
        if group is not None:
            group.abort(why)

    def _open(self, command: OpenGroup) -> str:
        self.leave("another group forms")
        place = command.membership
        store = listen(command.host, place.group.world, place.timeout_s)
        address = join_address(command.host, store.port)
        self._opened = replace(place, group=replace(place.group, address=address)), store
        return address

    def _send(self, command: SendWeights, is_unwanted: IsUnwanted | None) -> None:
        if self._opened is not None:
            (place, store), self._opened = self._opened, None
            device = self._device if place.group.backend == "nccl" else "cpu"
            self._group = form(place, device, store, is_unwanted)
            self._name = place.group.name
        if self._group is None or self._name != command.group:
            raise WeightsError("broadcast: not a member of this group")
        whole = TensorSpec("", "uint8", (command.file.num_bytes,), 0)
        [(_, data)] = map_tensors(command.file, [whole])
        send(self._group, data, is_unwanted)
