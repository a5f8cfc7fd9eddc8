"""Hooks that the simulator calls, and what their owners may use of it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lightrl.core.coordinator import Coordinator
from lightrl.core.events import Event
from lightrl.core.settings import Settings
from lightrl.core.state import Response, Round
from lightrl.sim.fleet.engine import SimDelta
from lightrl.sim.fleet.machines import SimMachine
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.scenario import Scenario, Switches
from lightrl.sim.outcome import SimOutcome, StepRecord
from lightrl.sim.trainer import TrainerModel

FOREVER_S = 1e12


class Simulation(Protocol):
    """The world, as its parts see it."""

    settings: Settings
    scenario: Scenario
    switches: Switches
    now: float
    core: Coordinator
    machines: dict[str, SimMachine]
    # by parallelism
    engines: dict[int, EngineProfile]
    outcome: SimOutcome
    # of the round that closed last
    newest: StepRecord
    trainer: TrainerModel

    def at(self, when: float, act: Callable[[], None]) -> None: ...
    def feed(self, event: Event) -> None: ...
    def abort(self, machine: SimMachine, response: str, number: int) -> None: ...
    def turn(self, machine: SimMachine, asleep: bool) -> None: ...
    def confirm(self, machine: SimMachine, version: int) -> None: ...
    def plan_training(self) -> None: ...
    def final_tokens(self, response: Response) -> int: ...


class Mechanism:
    """Hooks of a mechanism, which do nothing unless they are overridden."""

    def tokens(self, deltas: Sequence[SimDelta]) -> None:
        """The core has received tokens of a machine."""

    def keeps(self, machine: SimMachine, response: str, number: int) -> bool:
        """Return whether an attempt that the core aborts continues to run."""
        return False

    def round_closed(self, round: Round) -> None:
        """The core has closed a round; its record is `Simulation.newest`."""

    def step_trained(self) -> None:
        """The trainer has finished a step; its version is not published yet."""
