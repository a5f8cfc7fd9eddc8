"""Small worlds: 16 prompts x 4 responses of at most 600 tokens, on a few nodes."""

from dataclasses import replace
from functools import partial
from typing import Any

from lightrl.core.commands import Command
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import Event
from lightrl.core.settings import Settings
from lightrl.messages.responses import Sampling
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.nodes import NodeSpec
from lightrl.sim.inputs.scenario import Scenario, SimTraining, SimTransfer, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import SHORT_TAIL, RewardClass, RewardTimes, Workload
from lightrl.sim.world import World
from tests.support import invariants

LIMIT = 600
SETTINGS = Settings(
    run_seed=0,
    num_steps=4,
    prompts_per_step=8,
    group_size=4,
    max_response_tokens=LIMIT,
    sampling=Sampling(1.0),
    slots=16,
    vocabulary=1,
    lease_s=5.0,
    reward_on_failure=None,
    num_prompts=40,
)
SCENARIO = Scenario(
    Workload(
        "small",
        SHORT_TAIL.scaled(LIMIT),
        num_prompts=40,
        prompt_tokens=20,
        reward=RewardTimes((RewardClass(constant_s=0.1, median_s=0.2, sigma=0.5),)),
    ),
    engines={1: EngineProfile(context_s=1e-6), 2: EngineProfile(step_s=0.007, context_s=1e-6)},
    training=SimTraining(token_s=2e-4, step_s=0.5),
    transfer=SimTransfer(num_bytes=1e9, load_s=0.3),
)
COLOCATED = replace(SCENARIO, training=replace(SCENARIO.training, placement="colocated"))


def nodes(count: int, slots: int = 16, slowness: float = 1.0) -> list[NodeSpec]:
    return [NodeSpec(f"n{k}", slots, slowness=slowness) for k in range(count)]


def world(
    scenario: Scenario = SCENARIO,
    switches: Switches | None = None,
    fleet: list[NodeSpec] | None = None,
    trace: tuple[TraceEvent, ...] = (),
    check: bool = False,
    **changes: Any,
) -> World:
    """With `check` the invariants must hold after every event."""
    fleet = nodes(4) if fleet is None else fleet
    made = World(replace(SETTINGS, **changes), scenario, fleet, trace, switches or Switches())
    if check:
        made.handle = partial(_checked, made.core)
    return made


def _checked(core: Coordinator, event: Event, now: float) -> list[Command]:
    commands = core.handle(event, now)
    invariants.check(core)
    return commands
