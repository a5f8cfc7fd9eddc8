"""A rank process that runs out of its device's memory in the first pass, if it is rank 1: none but
CUDA does that by itself."""

import socket
from typing import Any, NoReturn

import torch

from lightrl.trainer.learner import learner
from lightrl.trainer.rank import rank

STARVED_TARGET = "tests.support.starved_rank:main"
ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB."


def starve(*_: Any, **__: Any) -> NoReturn:
    raise torch.OutOfMemoryError(ERROR)


class Starved(learner.Learner):
    def _backward(self, *batch: Any) -> None:
        if torch.distributed.get_rank() == 1:
            starve()
        super()._backward(*batch)


def main(sock: socket.socket) -> None:
    rank.Learner = Starved
    rank.main(sock)
