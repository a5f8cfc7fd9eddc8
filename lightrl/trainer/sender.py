"""A training rank as a member of a broadcast group: its rows of what it has published, to engines.

Owns the group that this rank is in, one at a time. Sends from the version's file, which holds what
is served, byte for byte; whoever tells a rank to send sees to it that the file stays. A failure
ends the group, never the rank: engines pull instead. Imports torch.
"""

from collections.abc import Iterator

import torch

from lightrl.errors import WeightsError
from lightrl.system.addresses import WILDCARD, join_address, split_address
from lightrl.trainer.protocol import (
    GroupJoined,
    GroupOpened,
    JoinGroup,
    OpenGroup,
    SendWeights,
    WeightsSent,
)
from lightrl.weights.broadcast.group import Group, form
from lightrl.weights.broadcast.pieces import byte_range
from lightrl.weights.broadcast.proof import Proof, proof_seed
from lightrl.weights.broadcast.rendezvous import Rendezvous
from lightrl.weights.broadcast.transfer import send
from lightrl.weights.version.manifest import read_manifest
from lightrl.weights.version.tensors import map_tensors


class Sender:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meet: Rendezvous | None = None
        self._group: Group | None = None
        self._name = ""

    def perform(
        self, command: OpenGroup | JoinGroup | SendWeights
    ) -> Iterator[GroupOpened | GroupJoined | WeightsSent]:
        try:
            match command:
                case OpenGroup(host):
                    self._leave()
                    self._meet = Rendezvous(host)
                    yield GroupOpened(join_address(*self._meet.address))
                case JoinGroup(place=place):
                    self._join(command)
                    yield GroupJoined(place.name)
                case SendWeights():
                    yield WeightsSent(self._send(command))
        except WeightsError as e:
            match command:
                case OpenGroup():
                    yield GroupOpened("", str(e))
                case JoinGroup(place=place):
                    yield GroupJoined(place.name, str(e))
                case SendWeights():
                    yield WeightsSent((), str(e))

    def _join(self, command: JoinGroup) -> None:
        meet, self._meet = self._meet, None
        address = split_address(command.address)
        if meet is None and address is None:
            raise WeightsError(f"{command.address}: not an address")
        device = self._device if command.place.backend == "nccl" else torch.device("cpu")
        if meet is None:
            self._leave()
        if address is not None and address[0] == WILDCARD:  # rank 0's, on this machine
            address = ("127.0.0.1", address[1])
        self._group = form(meet or address or ("", 0), command.place, device)
        self._name = command.place.name

    def _send(self, command: SendWeights) -> tuple[int, ...]:
        if self._group is None or self._name != command.group:
            raise WeightsError("broadcast: not a member of this group")
        group, tensors = self._group, read_manifest(command.file).tensors
        mine: list[torch.Tensor] = []
        for spec, (_, tensor) in zip(tensors, map_tensors(command.file, tensors), strict=True):
            start, end = byte_range(spec, group.rank, group.num_ranks)
            mine.append(tensor.reshape(-1).view(torch.uint8)[start:end].view(tensor.dtype))
        proof = Proof(proof_seed(command.group, command.file.policy_version), group.device)
        send(group, tensors, lambda i: mine[i].to(group.device), proof)
        return proof.sums()

    def _leave(self) -> None:
        if self._meet is not None:
            self._meet.close()
        if self._group is not None:
            self._group.abandon("another group forms")
        self._meet = self._group = None
