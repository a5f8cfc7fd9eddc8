"""What a compared system does besides scheduling: the hooks that the simulator calls, and what they
may use.

Owns no behaviour. How LightRL itself works is in world.py and the core; nothing there depends on
which mechanisms are present.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from lightrl.core.coordinator import Coordinator
from lightrl.core.events import Event
from lightrl.core.settings import Settings
from lightrl.core.state import Response, Round
from lightrl.sim.engine import SimDelta
from lightrl.sim.engine_profile import EngineProfile
from lightrl.sim.machines import SimMachine
from lightrl.sim.outcome import Outcome, StepRecord
from lightrl.sim.scenario import Scenario, Switches
from lightrl.sim.scoring import SimScoring
from lightrl.sim.trainer import TrainerModel

if TYPE_CHECKING:
    from lightrl.sim.membership import Membership
    from lightrl.sim.observer import Observer

FOREVER_S = 1e12


class Simulation(Protocol):
    """The world, as its mechanisms and its observer see it."""

    settings: Settings
    scenario: Scenario
    switches: Switches
    now: float
    core: Coordinator
    machines: dict[str, SimMachine]
    # by the devices that they span
    engines: dict[int, EngineProfile]
    outcome: Outcome
    # of the round that closed last
    newest: StepRecord
    scoring: SimScoring
    trainer: TrainerModel
    # the core says when devices change sides
    shares: bool

    @property
    def fleet(self) -> "Membership": ...
    @property
    def observer(self) -> "Observer": ...

    def at(self, when: float, act: Callable[[], None]) -> None: ...
    def feed(self, event: Event) -> None: ...
    def abort(self, machine: SimMachine, response: str, number: int) -> None: ...
    def turn(self, machine: SimMachine, asleep: bool) -> None: ...
    def confirm(self, machine: SimMachine, version: int) -> None: ...
    def plan_training(self) -> None: ...
    def final_tokens(self, response: Response, noise: int) -> int: ...


class Mechanism:
    """Each hook does nothing unless it is overridden."""

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        """A machine's tokens have reached the core."""

    def round_closed(self, round: Round) -> None:
        """The core has closed a round; its record is `Simulation.newest`."""

    def step_trained(self) -> None:
        """The trainer has finished a step; its version is not published yet."""
