"""The main loop of every rank process: start a rank, run its commands, report why it ends.

Owns the process's side of the pipe. Must not import torch.
"""

import contextlib
import ctypes
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from lightrl.errors import LightRLError, TrainerError
from lightrl.system.child import Pipe
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    LeaveBroadcast,
    Published,
    RankCommand,
    RankEvent,
    RankFailed,
    RankStarted,
    StartRank,
    StepFinished,
    Suspended,
)
from lightrl.weights.broadcast.membership import IsUnwanted

logger = logging.getLogger(__name__)

LINGER_S = 1.0

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

Report: TypeAlias = Callable[[RankEvent], None]


class RankPipe(Pipe[RankCommand, RankEvent]):
    """Sends events to the daemon: a frame is sent whole, whichever thread sends it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sending = threading.Lock()

    def send(self, event: RankEvent) -> None:
        with self._sending:
            super().send(event)


class AnyRank(Protocol):
    started: RankStarted

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        """Run the command, and yield its events as they occur. Work for a broadcast group stops as
        soon as it `is_unwanted`."""
        ...


def serve(sock: socket.socket, new_rank: Callable[[StartRank, Report], AnyRank]) -> None:
    """Serve commands. A rank may send events from other threads, too.

    Raises EOFError when the daemon closes the pipe, SystemExit if the rank fails.
    """
    pipe: RankPipe = RankPipe(sock, RANK_COMMANDS, RANK_EVENTS)
    try:
        _run(pipe, new_rank)
    except (LightRLError, OSError, RuntimeError, ValueError) as e:
        # torch raises these for lost peers; anything else is a bug, and ends the process.
        logger.exception("this rank failed")
        lines = str(e).strip().splitlines() or [type(e).__name__]
        is_final = isinstance(e, LightRLError)
        pipe.send(RankFailed(lines[0] if is_final else f"{type(e).__name__}: {lines[0]}", is_final))
        if is_final:
            _linger(pipe)
        raise SystemExit(1) from None


def _linger(pipe: RankPipe) -> None:
    """Wait until the daemon has read the reason and ends all ranks: without it ranks that lost this
    one would restart."""
    deadline = time.monotonic() + LINGER_S
    with contextlib.suppress(EOFError, OSError):
        while (left_s := deadline - time.monotonic()) > 0:
            pipe.receive(left_s)


def _run(pipe: RankPipe, new_rank: Callable[[StartRank, Report], AnyRank]) -> None:
    rank: AnyRank | None = None
    commands: deque[RankCommand] = deque()

    def is_unwanted() -> bool:
        commands.extend(pipe.receive(0.0))
        return any(isinstance(command, LeaveBroadcast) for command in commands)

    while True:
        if not commands:
            commands.extend(pipe.receive())
        command = commands.popleft()
        if rank is not None:
            for event in rank.perform(command, is_unwanted):
                pipe.send(event)
        elif isinstance(command, StartRank):
            rank = new_rank(command, pipe.send)
            pipe.send(rank.started)
        else:
            raise TrainerError(f"{type(command).__name__} before StartRank")


def require_step(step: int, command: RankCommand) -> None:
    """Raise TrainerError if the command is of another step than that of the rank."""
    asked = getattr(command, "step", step)
    if asked != step:
        raise TrainerError(
            f"{type(command).__name__} of step {asked}, but the rank is at step {step}"
        )


def finished(
    step: int,
    metrics: dict[str, float],
    publish_s: float,
    published: Published | None,
    suspended: Suspended | None,
) -> StepFinished:
    """The event at the end of a step, whose version took `publish_s` to publish."""
    metrics = metrics | {"timing_s/publish": publish_s, "weights/publish_s": publish_s}
    if suspended is not None:
        metrics["timing_s/park"] = suspended.seconds
    return StepFinished(step, metrics, published, suspended)


def reuse_memory() -> None:
    """glibc hands freed tensors of 128 KiB and more back to the kernel; faulting the pages in again
    in every layer of every pass costs a tiny model on a CPU a quarter of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
