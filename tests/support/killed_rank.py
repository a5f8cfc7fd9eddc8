"""A rank process that kills itself in its second save: the checkpoint is written, but not in place.

No test can kill it in a save for certain, which takes as long as it takes.
"""

import os
import signal
import socket
from pathlib import Path

from lightrl.trainer.checkpoint import writer
from lightrl.trainer.rank import rank

KILLED_TARGET = "tests.support.killed_rank:main"


def main(sock: socket.socket) -> None:
    put_in_place = writer.put_in_place
    placed: list[Path] = []

    def place(draft: Path, path: Path, keep_last: int, keep_every: int) -> None:
        if placed:
            os.kill(os.getpid(), signal.SIGKILL)
        put_in_place(draft, path, keep_last, keep_every)
        placed.append(path)

    writer.put_in_place = place
    rank.main(sock)
