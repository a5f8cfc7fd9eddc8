"""What all parts of a simulated world share: the time, the core, the machines, and a heap of what
happens next."""

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from lightrl.core.commands import Command
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import Event, TimerFired
from lightrl.core.settings import Settings
from lightrl.errors import SimError
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.inputs.scenario import Scenario, Switches
from lightrl.sim.outcome import SimOutcome

FOREVER_S = 1e12
MAX_TIMERS = 200_000  # in a row, without any other event


class Simulation(ABC):
    """Feeds the core with events in the order of their times; `World` performs its commands.

    `handle` is the core's; a wrapper of it receives every event and may change the commands.
    """

    def __init__(self, settings: Settings, scenario: Scenario, switches: Switches) -> None:
        self.settings = settings
        self.scenario = scenario
        self.switches = switches
        self.now = 0.0
        self.core = Coordinator(settings, now=0.0)
        self.handle = self.core.handle
        self.machines: dict[str, SimMachine] = {}
        self.engines = dict(scenario.engines)  # by parallelism
        self.outcome = SimOutcome()
        self.is_finished = False
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._alarms: dict[str, float] = {}

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Act immediately if it takes no time."""
        if seconds:
            self.at(self.now + seconds, act)
        else:
            act()

    def set_alarm(self, owner: str, when: float, act: Callable[[], None]) -> None:
        """Act at `when`, in place of what was set for this owner before; infinite = never."""
        if self._alarms.get(owner) != when:
            self._alarms[owner] = when
            if when < math.inf:
                self.at(when, lambda: self._ring(owner, when, act))

    def _ring(self, owner: str, when: float, act: Callable[[], None]) -> None:
        if self._alarms.get(owner) == when:  # else another time was set
            del self._alarms[owner]
            act()

    def play(self) -> None:
        """Simulate until the core finishes the run. Raise SimError if no event is left."""
        heap, timers = self._heap, 0
        while not self.is_finished:
            deadline = self.core.next_deadline()
            next_at = heap[0][0] if heap else FOREVER_S
            if (deadline or FOREVER_S) >= next_at >= FOREVER_S or timers > MAX_TIMERS:
                raise SimError(
                    f"the run is stuck at step {self.core.step} of {self.settings.num_steps} after "
                    f"{self.now:.0f} s: no node is left, or none can load the weights"
                )
            if deadline is not None and deadline < next_at:
                self.now = max(self.now, deadline)
                timers += 1
                self.feed(TimerFired())
                continue
            timers = 0
            self.now, _, act = heapq.heappop(heap)
            act()

    def feed(self, event: Event) -> None:
        """Let the core handle this event, and perform what it commands."""
        todo = deque((event,))
        while todo:
            for command in self.handle(todo.popleft(), self.now):
                self.perform(command, todo)

    @abstractmethod
    def perform(self, command: Command, todo: deque[Event]) -> None:
        """Perform a command as a daemon does; append the events that take no time to `todo`."""
