"""What a run is compared with: the synchronous baseline, and each mechanism alone on top of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightrl.core.settings import Settings, Tail
from lightrl.sim.inputs.nodes import NodeChanges, NodeSpec, can_group
from lightrl.sim.inputs.scenario import OffloadRule, Scenario, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.report import Figures, figures
from lightrl.sim.world import World

LARGE_STEP = 4096  # responses; in larger steps chunks of tokens are larger, for speed
ETA = 1.25  # of tail batching where the config has it off


Variant: TypeAlias = tuple[Settings, Switches]


@dataclass(frozen=True, slots=True)
class SimFleet:
    """Nodes that stay, or join and leave as those of a run did; others do so by a trace."""

    nodes: Sequence[NodeSpec]
    trace: Sequence[TraceEvent] = ()
    changes: NodeChanges | None = None


def configured(settings: Settings, offload: OffloadRule = "off") -> Variant:
    """Return the config's own setting; `offload`: the rule by which shared devices change sides."""
    return settings, Switches(offload=offload)


def synchronous(settings: Settings) -> Variant:
    """Return plain rounds, then all rewards, then training, as in verl; no response is migrated."""
    plain = replace(settings, tail=Tail(), max_staleness=0, foresight=False, migration=False)
    return plain, Switches(streaming=False, async_rewards=False)


def variants(settings: Settings, offload: OffloadRule = "off") -> dict[str, Variant]:
    """Return each mechanism alone, then the config's own setting; all but the last two rows are
    on-policy."""
    base = s, off = synchronous(settings)
    eta = max(settings.tail.eta_prompts, settings.tail.eta_responses)
    tail = replace(settings.tail, eta_prompts=eta if eta > 1 else ETA, eta_responses=1.0)
    early = replace(off, async_rewards=True)
    streamed = replace(early, streaming=True)
    return {
        "synchronous": base,
        "async rewards": (s, early),
        "async rewards, streaming": (s, streamed),
        "offload: foreseen": (s, replace(streamed, offload="foreseen")),
        "offload: window": (s, replace(streamed, offload="window")),
        "migration": (replace(s, migration=True), off),
        "foresight": (replace(s, foresight=True), off),
        "tail: prompts": (replace(s, tail=tail), off),
        "tail: both": (replace(s, tail=replace(tail, eta_responses=tail.eta_prompts)), off),
        "planner": (s, replace(off, planner=True)),
        "speculation": (s, replace(off, speculation=True)),
        "staleness 1": (replace(s, max_staleness=1), streamed),
        "as configured": configured(settings, offload),
    }


def simulate(variant: Variant, scenario: Scenario, fleet: SimFleet) -> SimOutcome:
    settings, switches = variant
    if scenario.chunk_s < math.inf:
        chunk_s, chunk_tokens = scenario.chunk_s, settings.chunk_tokens
        switches = replace(switches, chunk_tokens=chunk_tokens, chunk_s=chunk_s, prompt_batch=0)
    elif settings.prompts_launched * settings.responses_launched > LARGE_STEP:
        switches = replace(switches, chunk_tokens=8 * switches.chunk_tokens)
    return World(settings, scenario, fleet.nodes, fleet.trace, switches, fleet.changes).run()


def compare(
    settings: Settings, scenario: Scenario, fleet: SimFleet, offload: OffloadRule = "off"
) -> dict[str, Figures]:
    """Simulate all variants that fit this scenario, with speed-ups over the first."""
    named: dict[str, Figures] = {}
    baseline_s: float | None = None
    for name, variant in variants(settings, offload).items():
        is_async, switches = variant[0].max_staleness > 0, variant[1]
        # a colocated trainer cannot train while the next round samples
        fits = not is_async if scenario.is_colocated else switches.offload == "off"
        if fits and (not switches.planner or can_group(fleet.nodes, scenario.engines)):
            outcome = simulate(variant, scenario, fleet)
            baseline_s = baseline_s or outcome.step_s
            named[name] = figures(outcome, scenario, baseline_s)
    return named
