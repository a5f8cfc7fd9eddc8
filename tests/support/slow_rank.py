"""A rank process that starts late, and takes long over a step, of which it gives signs of life."""

import socket
import time
from collections.abc import Iterator

from lightrl.trainer.protocol import RankCommand, RankEvent, StartRank, StillAlive, Update
from lightrl.trainer.rank.emulated import EmulatedRank
from lightrl.trainer.rank.main import serve
from lightrl.weights.broadcast.membership import IsUnwanted

SLOW_TARGET = "tests.support.slow_rank:main"
LATE_S = 0.7
SIGNS, EVERY_S = 12, 0.15


class SlowRank(EmulatedRank):
    def __init__(self, start: StartRank) -> None:
        time.sleep(LATE_S)
        super().__init__(start)

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        if isinstance(command, Update):
            for _ in range(SIGNS):
                time.sleep(EVERY_S)
                yield StillAlive(command.step)
        yield from super().perform(command, is_unwanted)


def main(sock: socket.socket) -> None:
    serve(sock, lambda start, _: SlowRank(start))
