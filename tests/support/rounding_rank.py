"""A rank process that rounds differently after a restart, as sums by atomics do on a GPU. With
`rounding/` in PYTHONPATH each rank of a run is such a one."""

import socket
from pathlib import Path

import torch

from lightrl.trainer.learner import learner
from lightrl.trainer.protocol import StartRank
from lightrl.trainer.rank import rank

PYTHONPATH = str(Path(__file__).parent / "rounding")
RELATIVE = 1e-6  # of a gradient: about what float32 rounds in a sum of some hundred


class Rounding(learner.Learner):
    def _descend(self, scale: float, lr: float) -> tuple[float, bool]:
        for p in self.policy.module.parameters():
            if p.grad is not None:
                noise = torch.arange(p.numel()).double().sin().float().view_as(p)
                p.grad.mul_(1 + RELATIVE * noise)
        return super()._descend(scale, lr)


class RoundingRank(rank.Rank):
    def __init__(self, start: StartRank, *args: object) -> None:
        began = Path(start.run_dir) / "a rank has begun"
        if began.exists():
            rank.Learner = Rounding
        began.touch()
        super().__init__(start, *args)  # type: ignore[arg-type]


def main(sock: socket.socket) -> None:
    rank.Rank = RoundingRank  # type: ignore[misc]
    rank.main(sock)
