"""Decide when the ranks of one trainer node hold devices that they share with engines, and report
it to the coordinator.

Each trainer node answers for its own ranks. The leading node suspends the ranks of all nodes at the
same place of the step. Must not import torch: the daemon imports this file.
"""

import asyncio
import time
from collections.abc import Callable

from lightrl.config.schema import Config
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import TrainShard
from lightrl.trainer.protocol import (
    TAKES_DEVICE,
    Done,
    RankCommand,
    RankEvent,
    RankStarted,
    StepFinished,
    Suspended,
    Update,
)


class NodeDevices:
    """Tracks whether the ranks hold devices, also across restarts: from their start until each of
    them is suspended, and again from the first command that takes them. Ranks that are lost while
    they hold them restart immediately. Where each replica has devices of its own (`device_parts`),
    ranks start once all parts are given."""

    def __init__(
        self,
        config: Config,
        send: Callable[[DevicesReleased], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` reaches the coordinator."""
        self.are_shared = config.rollout.placement == "shared"  # else all of this is idle
        self._num_ranks = config.train.ranks
        self._num_parts = config.device_parts
        self._send = send
        self._clock = clock
        self.has_devices = True
        self._step = 0  # that is trained next
        # parts on which work may be done since engines had them
        self._given = frozenset[int]()
        self._all_given = asyncio.Event()
        self._is_published = False  # the version that the ranks started or were suspended with
        self._suspended: dict[int, Suspended] = {}  # by rank
        self._number: int | None = None  # of the order that is not answered yet
        self._asked_at = 0.0
        self._newest = 0  # number of the newest order

    @property
    def is_given(self) -> bool:
        return not self.are_shared or bool(self._given)

    @property
    def all_given(self) -> bool:
        return not self.are_shared or self._all_given.is_set()

    def is_given_to(self, replica: int) -> bool:
        """Return whether its ranks may work, if any may."""
        return self._num_parts == 1 or replica in self._given

    @property
    def are_away(self) -> bool:
        """Engines hold some of them. They wake when a version is published, not before."""
        return not self.has_devices and not self.all_given and self._is_published

    @property
    def is_asked(self) -> bool:
        return self._number is not None

    def ask(self, number: int, ends_first: bool = False) -> None:
        """Handle an order to give the devices back. `ends_first`: the step has all of its groups
        and gives them back at its end. Older orders are ignored; a repeated one is answered
        again."""
        if not self.are_shared or number < self._newest:
            return
        is_repeated, self._newest = number == self._newest, number
        ends_first = ends_first and self.all_given
        if not is_repeated and not ends_first:
            self._take_back()
        if not self.has_devices and not ends_first:
            self._send(DevicesReleased("trainer", number, self._num_bytes, 0.0))
        elif not is_repeated:
            self._number, self._asked_at = number, self._clock()

    def on_command(self, command: RankCommand) -> None:
        """The ranks are sent this command."""
        if isinstance(command, TAKES_DEVICE):
            self._take()
        if isinstance(command, Update) and command.policy_version is not None:
            self.ends_step(command.step + 1)

    def starting(self, step: int = 0) -> None:
        """Ranks are about to start for this step, and take the devices for it."""
        self._take()
        self.ends_step(step)

    def ends_step(self, next_step: int) -> None:
        """The ranks are suspended next, and then publish a version."""
        self._step = next_step
        self._take_back()
        self._is_published = False

    def on_message(self, message: object) -> None:
        match message:
            case TrainShard() if self._num_parts == 1:  # no SetDevices assigns them
                self.give()
            case SetDevices(active=True):
                self.give(message)
            case _:
                pass

    def lost(self) -> bool:
        """The ranks are dead. Return whether they wait for their devices: `are_away`. Ranks of
        several parts wait until all are given, and hold none meanwhile."""
        if self._num_parts > 1 and not self.all_given and self._is_published:
            self.has_devices = False
            self._answer()
        return self.are_away

    def on_event(self, rank: int, event: RankEvent) -> None:
        """A rank of this node has sent an event."""
        if not isinstance(event, RankStarted | StepFinished | Done) or event.suspended is None:
            return
        self._suspended[rank] = event.suspended
        if len(self._suspended) == self._num_ranks:
            self.has_devices = False
            self._answer()

    def announce(self) -> None:
        """Send what precedes each version, if the ranks are suspended."""
        if not self.has_devices and self._suspended:
            slowest = max(suspended.seconds for suspended in self._suspended.values())
            self._send(DevicesReleased("trainer", 0, self._num_bytes, slowest))

    def published(self) -> None:
        """The version was sent to the coordinator."""
        self._is_published = True

    def give(self, given: SetDevices | None = None) -> None:
        """Work may be done on these parts, or on all. Orders for other steps are ignored."""
        if given is None:
            self._given = frozenset(range(self._num_parts))
        elif given.number == self._step:
            self._given = frozenset(given.parts)
        if len(self._given) == self._num_parts:
            self._all_given.set()

    async def given(self) -> None:
        """Wait until work may be done on all of them."""
        await self._all_given.wait()

    def forget_orders(self) -> None:
        """The coordinator is gone, or restarted and counts from 1."""
        self._number, self._newest = None, 0
        if self._num_parts > 1:
            self._take_back()

    def _take_back(self) -> None:
        self._given = frozenset()
        self._all_given.clear()

    def _take(self) -> None:
        self.has_devices = True
        self._suspended.clear()

    def _answer(self) -> None:
        if self._number is not None:
            seconds = self._clock() - self._asked_at
            self._send(DevicesReleased("trainer", self._number, self._num_bytes, seconds))
            self._number = None

    @property
    def _num_bytes(self) -> int:
        return sum(suspended.num_bytes for suspended in self._suspended.values())
