"""Training rank 0 or an engine's worker without a model, a process: `python -m
scripts.bench.weights_lib.race_member rank | engine`.

Speaks JSON lines, an answer for each. A rank: {"open": host, "world": n}, {"send": VersionFile}. An
engine: {"receive": VersionFile, "place": BroadcastGroup}, {"load": VersionFile}; it copies what
comes into tensors that it has already.
"""

import json
import os
import sys
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from lightrl.engine.base import ReceiveWeights
from lightrl.engine.member import Member
from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.trainer.protocol import OpenGroup, SendWeights
from lightrl.trainer.rank.sender import BroadcastSender
from lightrl.weights.broadcast.membership import Membership
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.tensors import map_tensors

NAME, TIMEOUT_S = "race", 60.0


class Rank:
    def __init__(self) -> None:
        self._sender = BroadcastSender(torch.device("cpu"))

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"open": host, "world": world}:
                group = BroadcastGroup(NAME, "", 0, world, "gloo")
                command = OpenGroup(host, Membership(group, TIMEOUT_S))
            case _:
                command = SendWeights(VersionFile(**order["send"]), NAME)
        answer = self._sender.perform(0, command)
        if answer.error:
            raise RuntimeError(answer.error)
        return {"address": answer.address} if answer.address else {}


class Engine:
    def __init__(self) -> None:
        self._member = Member()
        self._targets: dict[str, torch.Tensor] = {}

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"prepare": file}:
                for name, tensor in self._mapped(VersionFile(**file)):
                    self._targets[name] = torch.zeros_like(tensor)
            case {"load": file}:
                for name, tensor in self._mapped(VersionFile(**file)):
                    self._targets[name].copy_(tensor)
            case _:
                place = Membership(BroadcastGroup(**order["place"]), TIMEOUT_S)
                command = ReceiveWeights(VersionFile(**order["receive"]), place)
                for name, tensor in self._member.receive(command, 0, "cpu", None):
                    self._targets[name].copy_(tensor)
        return {}

    def _mapped(self, file: VersionFile) -> Any:
        return map_tensors(file, read_manifest(file).tensors)


def main(kind: str) -> None:
    torch.set_num_threads(1)
    member = Rank() if kind == "rank" else Engine()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(member.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
