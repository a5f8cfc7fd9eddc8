"""A training rank as a member of a broadcast group: its rows of what it has published, to engines.

Owns the group that this rank is in, one at a time. Sends from the version's file, which holds what
is served, byte for byte; whoever tells a rank to send sees to it that the file stays. A failure
ends the group, never the rank: engines pull instead. Imports torch.
"""

import logging

import torch

from lightrl.errors import LightRLError, WeightsError, first_line
from lightrl.system.addresses import WILDCARD, join_address, split_address
from lightrl.trainer.protocol import GroupOpened, OpenGroup, SendWeights, WeightsSent
from lightrl.weights.broadcast.group import Group, form
from lightrl.weights.broadcast.pieces import byte_range
from lightrl.weights.broadcast.proof import Proof, proof_seed
from lightrl.weights.broadcast.rendezvous import GroupJoined, IsUnwanted, JoinGroup, Rendezvous
from lightrl.weights.broadcast.transfer import send
from lightrl.weights.version.manifest import read_manifest
from lightrl.weights.version.tensors import map_tensors

logger = logging.getLogger(__name__)

# What torch, a file or a device raises for want of memory, and for much else: the rank goes on, and
# says why it fails itself if that is so.
OF_TORCH = (OSError, RuntimeError, ValueError, MemoryError)


class Sender:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meet: Rendezvous | None = None
        self._group: Group | None = None
        self._name = ""

    def perform(
        self, command: OpenGroup | JoinGroup | SendWeights, is_unwanted: IsUnwanted | None = None
    ) -> GroupOpened | GroupJoined | WeightsSent:
        """Gives up as soon as what it does `is_unwanted`."""
        try:
            match command:
                case OpenGroup(host):
                    self.leave("another group forms")
                    self._meet = Rendezvous(host)
                    return GroupOpened(join_address(*self._meet.address))
                case JoinGroup(place=place):
                    self._join(command, is_unwanted)
                    return GroupJoined(place.name)
                case SendWeights():
                    return WeightsSent(self._send(command, is_unwanted))
        except (LightRLError, *OF_TORCH) as e:
            if not isinstance(e, LightRLError):
                logger.exception("no broadcast")
            reason = first_line(e)
            self.leave(reason.removeprefix("broadcast: "))
        match command:
            case OpenGroup():
                return GroupOpened("", reason)
            case JoinGroup(place=place):
                return GroupJoined(place.name, reason)
            case SendWeights():
                return WeightsSent((), reason)

    def leave(self, why: str) -> None:
        """Whoever is, or waits to be, in a group with this rank learns that it is over."""
        meet, group, self._meet, self._group = self._meet, self._group, None, None
        if meet is not None:
            meet.close()
        if group is not None:
            group.abandon(why)

    def _join(self, command: JoinGroup, is_unwanted: IsUnwanted | None) -> None:
        meet, self._meet = self._meet, None
        address = split_address(command.address)
        if meet is None and address is None:
            raise WeightsError(f"{command.address}: not an address")
        device = self._device if command.place.backend == "nccl" else torch.device("cpu")
        if meet is None:
            self.leave("another group forms")
        if address is not None and address[0] == WILDCARD:  # rank 0's, on this machine
            address = ("127.0.0.1", address[1])
        self._group = form(meet or address or ("", 0), command.place, device, is_unwanted)
        self._name = command.place.name

    def _send(self, command: SendWeights, is_unwanted: IsUnwanted | None) -> tuple[int, ...]:
        if self._group is None or self._name != command.group:
            raise WeightsError("broadcast: not a member of this group")
        group, tensors = self._group, read_manifest(command.file).tensors
        mine: list[torch.Tensor] = []
        for spec, (_, tensor) in zip(tensors, map_tensors(command.file, tensors), strict=True):
            start, end = byte_range(spec, group.rank, group.num_ranks)
            mine.append(tensor.reshape(-1).view(torch.uint8)[start:end].view(tensor.dtype))
        proof = Proof(proof_seed(command.group, command.file.policy_version), group.device)
        send(group, tensors, lambda i: mine[i].to(group.device), proof, is_unwanted)
        return proof.sums()
