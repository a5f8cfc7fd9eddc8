"""What every rank process does: starts a rank as it is told, obeys it command by command, says why
it ends.

Owns the process's side of the pipe. Knows nothing of what a rank computes, and must not import
torch.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from lightrl.errors import LightRLError, TrainerError
from lightrl.system.child import Pipe
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    LeaveGroup,
    RankCommand,
    RankEvent,
    RankFailed,
    RankStarted,
    StartRank,
)
from lightrl.weights.broadcast.rendezvous import IsUnwanted

logger = logging.getLogger(__name__)

RankPipe = Pipe[RankCommand, RankEvent]


class AnyRank(Protocol):
    started: RankStarted

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        """Carries the command out; each event is to be sent as soon as it comes out. What it does
        as a member of a broadcast group is over as soon as that `is_unwanted`."""
        ...


def serve(sock: socket.socket, new_rank: Callable[[StartRank], AnyRank]) -> None:
    """Serves commands. Raises EOFError when the daemon closes the pipe, SystemExit if the rank
    fails."""
    pipe: RankPipe = Pipe(sock, RANK_COMMANDS, RANK_EVENTS)
    try:
        _obey(pipe, new_rank)
    except (LightRLError, OSError, RuntimeError, ValueError) as e:
        # What torch raises for out of memory and lost peers. Anything else is a bug: the daemon
        # sees the process end with a traceback.
        logger.exception("this rank failed")
        lines = str(e).strip().splitlines() or [type(e).__name__]
        is_final = isinstance(e, LightRLError)
        pipe.send(RankFailed(lines[0] if is_final else f"{type(e).__name__}: {lines[0]}", is_final))
        raise SystemExit(1) from None


def _obey(pipe: RankPipe, new_rank: Callable[[StartRank], AnyRank]) -> None:
    rank: AnyRank | None = None
    commands: deque[RankCommand] = deque()

    def is_unwanted() -> bool:
        commands.extend(pipe.receive(0.0))
        return any(isinstance(command, LeaveGroup) for command in commands)

    while True:
        if not commands:
            commands.extend(pipe.receive())
        command = commands.popleft()
        if rank is not None:
            for event in rank.perform(command, is_unwanted):
                pipe.send(event)
        elif isinstance(command, StartRank):
            rank = new_rank(command)
            pipe.send(rank.started)
        else:
            raise TrainerError(f"{type(command).__name__} before StartRank")
