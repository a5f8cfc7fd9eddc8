"""Whether the ranks of one trainer node have its devices, where these are shared with engines, and
what the coordinator is told of that.

Each trainer node answers for its own ranks. When they park is for the node that leads to
order, for all ranks at the same place.
"""

import asyncio
import time
from collections.abc import Callable

from lightrl.config.schema import Config
from lightrl.messages.sharing import AssignDevices, SuspendTrainer, TrainerSuspended
from lightrl.messages.training import TrainShard
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
    there are none, if they had them when they were lost, as they start again at once. Where the
    replicas of the model are parts that change sides by themselves they start once all of them are
    given."""

    def __init__(
        self,
        config: Config,
        send: Callable[[TrainerSuspended], None],
        send_for_lost: Callable[[TrainerSuspended], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` reaches the coordinator, if it hears this node and the ranks that it has;
        `send_for_lost` also while these wait for their devices."""
        self.are_shared = config.rollout.placement == "shared"  # else nothing of all this happens
        self._num_ranks = config.train.ranks
        self._num_parts = config.device_parts
        self._send = send
        self._send_for_lost = send_for_lost or send
        self._clock = clock
        self.has_devices = True
        self._step = 0  # that is trained next
        self._are_lost = False  # the ranks, which wait until all of the devices are given
        # of the whole run, that work may be done on since others were to have them
        self._given = frozenset[int]()
        self._all_given = asyncio.Event()
        self._is_told = False  # others know of the version with which the ranks started, or parked
        self._parked: dict[int, RankParked] = {}  # by rank
        self._number: int | None = None  # of the order that is to be answered
        self._asked_at = 0.0
        self._newest = 0  # order of this coordinator

    @property
    def is_given(self) -> bool:
        return not self.are_shared or bool(self._given)

    @property
    def all_given(self) -> bool:
        return not self.are_shared or self._all_given.is_set()

    def is_given_to(self, replica: int) -> bool:
        """Whether its ranks may work, if any may."""
        return self._num_parts == 1 or replica in self._given

    @property
    def are_away(self) -> bool:
        """Engines have some of them, as far as anybody has said. Not yet if nobody was told the
        version: they wake for it, and without it no work comes either."""
        return not self.has_devices and not self.all_given and self._is_told

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
        ends_first = ends_first and self.all_given
        if not is_repeated and not ends_first:
            self._take_back()
        if not self.has_devices and not ends_first:
            self._say(TrainerSuspended(number, self._num_bytes, 0.0))
        elif not is_repeated:
            self._number, self._asked_at = number, self._clock()

    def told(self, command: RankCommand) -> None:
        """Ranks are told this."""
        if isinstance(command, TAKES_DEVICE):
            self._take()
        if isinstance(command, FinishStep):  # then they park
            self._step = command.step + 1
            self._give_back()

    def starting(self, step: int = 0) -> None:
        """Ranks are about to start for this step, and take the devices for it."""
        self._step, self._are_lost = step, False
        self._take()
        self._give_back()

    def hear(self, message: object) -> None:
        """What the coordinator says."""
        match message:
            case TrainShard():
                self.work_came()
            case AssignDevices():
                self.give(message)
            case SuspendTrainer(number) if self._are_lost and self.are_away:
                self.ask(number)
            case _:
                pass

    def lost(self) -> bool:
        """The ranks are dead. Those of parts wait until all of these are given, and meanwhile
        nothing is on any of them. Returns whether they wait: `are_away`."""
        if self._num_parts > 1 and not self.all_given and self._is_told:
            self.has_devices, self._are_lost = False, True
            self._answer()
        return self.are_away

    def _give_back(self) -> None:
        """They park next, and say a version then."""
        self._take_back()
        self._is_told = False

    def _take_back(self) -> None:
        self._given = frozenset()
        self._all_given.clear()

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
        self._answer()

    def _answer(self) -> None:
        if self._number is not None:
            seconds = self._clock() - self._asked_at
            self._say(TrainerSuspended(self._number, self._num_bytes, seconds))
            self._number = None

    def _say(self, parked: TrainerSuspended) -> None:
        (self._send_for_lost if self._are_lost else self._send)(parked)

    def announce(self) -> None:
        """What comes before each version, if the ranks are parked."""
        if not self.has_devices and self._parked:
            slowest = max(parked.seconds for parked in self._parked.values())
            self._say(TrainerSuspended(0, self._num_bytes, slowest))

    def published(self) -> None:
        """The version was said."""
        self._is_told = True

    def give(self, given: AssignDevices | None = None) -> None:
        """They may be worked on: these parts of them, or all. What was meant for a step that is
        over counts for nothing."""
        if given is None:
            self._given = frozenset(range(self._num_parts))
        elif given.step == self._step:
            self._given = frozenset(given.parts)
        if len(self._given) == self._num_parts:
            self._all_given.set()

    def work_came(self) -> None:
        """That the coordinator sends to who may have them: where they change sides as a whole
        nothing else says so."""
        if self._num_parts == 1:
            self.give()

    async def given(self) -> None:
        """Returns when all of them may be worked on."""
        await self._all_given.wait()

    def forget_orders(self) -> None:
        """Who gave them is gone, or counts anew."""
        self._number, self._newest = None, 0
        if self._num_parts > 1:
            self._take_back()

    @property
    def _num_bytes(self) -> int:
        return sum(parked.num_bytes for parked in self._parked.values())
