"""Whether the ranks of one trainer node have its devices, where these are shared with engines, and
what the coordinator is told of that.

Each trainer node answers for its own ranks. When they park is for the node that leads to
order, for all ranks at the same place.
"""

import asyncio
import time
from collections.abc import Callable

from lightrl.config import Config
from lightrl.sharing_messages import Parked
from lightrl.trainer.protocol import (
    TAKES_DEVICE,
    FinishStep,
    RankCommand,
    RankEvent,
    RankParked,
    RankStarted,
)


class NodeDevices:
    """Of one node, over all lives of its ranks. Its ranks have the devices from before they start
    until each of them has parked, and again from the first command that takes them: also while
    there are none, if they had them when they were lost."""

    def __init__(
        self,
        config: Config,
        send: Callable[[Parked], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` reaches the coordinator, if it hears this node."""
        self.are_shared = config.rollout.placement == "shared"  # else nothing of all this happens
        self._num_ranks = config.train.ranks
        self._send = send
        self._clock = clock
        self.has_devices = True
        self._given = asyncio.Event()  # work has come since others were to have them
        self._is_told = False  # others know of the version with which the ranks started, or parked
        self._parked: dict[int, RankParked] = {}  # by rank
        self._number: int | None = None  # of the order that is to be answered
        self._asked_at = 0.0
        self._newest = 0  # order of this coordinator

    @property
    def is_given(self) -> bool:
        return not self.are_shared or self._given.is_set()

    @property
    def are_away(self) -> bool:
        """Engines have them, as far as anybody has said. Not yet if nobody was told the version:
        they wake for it, and without it no work comes either."""
        return not self.has_devices and not self.is_given and self._is_told

    @property
    def is_asked(self) -> bool:
        return self._number is not None

    def ask(self, number: int, ends_first: bool = False) -> None:
        """To give the devices back. `ends_first`: all of the step has come, at the end of which it
        is done anyway. An older order than another one is late; the same one again is answered as
        long as that is true."""
        if not self.are_shared or number < self._newest:
            return
        is_repeated, self._newest = number == self._newest, number
        ends_first = ends_first and self.is_given
        if not is_repeated and not ends_first:
            self._given.clear()
        if not self.has_devices and not ends_first:
            self._send(Parked(number, self._num_bytes, 0.0))
        elif not is_repeated:
            self._number, self._asked_at = number, self._clock()

    def told(self, command: RankCommand) -> None:
        """Ranks are told this."""
        if isinstance(command, TAKES_DEVICE):
            self._take()
        if isinstance(command, FinishStep):  # then they park
            self._give_back()

    def starting(self) -> None:
        """Ranks are about to start, and take the devices for it."""
        self._take()
        self._give_back()

    def _give_back(self) -> None:
        """They park next, and say a version then."""
        self._given.clear()
        self._is_told = False

    def _take(self) -> None:
        """Ranks are told something for which they take the devices."""
        self.has_devices = True
        self._parked.clear()

    def heard(self, rank: int, event: RankEvent) -> None:
        """This rank of the node has said that it parked, or something else."""
        parked = event.parked if isinstance(event, RankStarted) else event
        if not isinstance(parked, RankParked):
            return
        self._parked[rank] = parked
        if len(self._parked) < self._num_ranks:
            return
        self.has_devices = False
        if self._number is not None:
            seconds = self._clock() - self._asked_at
            self._send(Parked(self._number, self._num_bytes, seconds))
            self._number = None

    def announce(self) -> None:
        """What comes before each version, if the ranks are parked."""
        if not self.has_devices and self._parked:
            slowest = max(parked.seconds for parked in self._parked.values())
            self._send(Parked(0, self._num_bytes, slowest))

    def published(self) -> None:
        """The version was said."""
        self._is_told = True

    def give(self) -> None:
        """Work has come that the coordinator sends to who may have the devices."""
        self._given.set()

    async def given(self) -> None:
        """Returns when work has come."""
        await self._given.wait()

    def forget_orders(self) -> None:
        """Who gave them is gone, or counts anew."""
        self._number, self._newest = None, 0

    @property
    def _num_bytes(self) -> int:
        return sum(parked.num_bytes for parked in self._parked.values())
