"""A training rank or an engine's worker without a model, a process: `python -m
scripts.bench.weights_lib.race_member rank | engine`.

Speaks JSON lines, an answer for each. A rank: {"open": host}, {"join": address, "place": {...}},
{"send": VersionFile, "group": name}. An engine: {"join": ...}, {"receive": VersionFile, "group":
name}, {"load": VersionFile}; it copies what comes into tensors that it has already.
"""

import json
import os
import sys
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from lightrl.engine.base import ReceiveWeights
from lightrl.engine.member import Member
from lightrl.trainer.protocol import GroupOpened, OpenGroup, SendWeights, WeightsSent
from lightrl.trainer.rank.sender import Sender
from lightrl.weights.broadcast.rendezvous import JoinGroup, Membership
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.tensors import map_tensors


class Rank:
    def __init__(self) -> None:
        self._sender = Sender(torch.device("cpu"))

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"open": host}:
                command = OpenGroup(host)
            case {"join": address, "place": place}:
                command = JoinGroup(address, Membership(**place))
            case _:
                command = SendWeights(VersionFile(**order["send"]), order["group"])
        answer = self._sender.perform(command)
        if answer.error:
            raise RuntimeError(answer.error)
        match answer:
            case GroupOpened():
                return {"address": answer.address}
            case WeightsSent():
                return {"sums": answer.sums}
        return {}


class Engine:
    def __init__(self) -> None:
        self._member = Member()
        self._targets: dict[str, torch.Tensor] = {}

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"join": address, "place": place}:
                self._member.join(JoinGroup(address, Membership(**place)), 0, "cpu")
            case {"prepare": file}:
                for name, tensor in self._mapped(VersionFile(**file)):
                    self._targets[name] = torch.zeros_like(tensor)
            case {"load": file}:
                for name, tensor in self._mapped(VersionFile(**file)):
                    self._targets[name].copy_(tensor)
            case _:
                file = VersionFile(**order["receive"])
                command = ReceiveWeights(file, order["group"])
                tensors = read_manifest(file).tensors
                return {"sums": self._member.load(command, tensors, self._targets, lambda: False)}
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
