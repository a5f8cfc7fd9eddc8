"""What a run is compared with: the synchronous baseline, and each mechanism alone on top of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightrl.core.settings import Settings, Tail
from lightrl.sim.inputs.nodes import NodeChanges, NodeSpec, can_group
from lightrl.sim.inputs.scenario import OffloadRule, Scenario, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.report import Figures, figures
from lightrl.sim.world import World

LARGE_STEP = 4096  # responses; in larger steps chunks of tokens are larger, for speed
ETA = 1.25  # of tail batching where the config has it off


@dataclass(frozen=True, slots=True)
class Variant:
    settings: Settings
    switches: Switches


@dataclass(frozen=True, slots=True)
class SimFleet:
    """Nodes that stay, nodes that join and leave by a trace, and as the nodes of a run did."""

    nodes: Sequence[NodeSpec]
    trace: Sequence[TraceEvent] = ()
    changes: NodeChanges | None = None


def configured(settings: Settings, offload: OffloadRule = "off") -> Variant:
    """Return the config's own setting; `offload`: the rule by which shared devices change sides."""
    return Variant(settings, Switches(offload=offload))


def synchronous(settings: Settings) -> Variant:
    """Return plain rounds, then all rewards, then training, as in verl; no response is migrated."""
    plain = replace(settings, tail=Tail(), max_staleness=0, foresight=False, migration=False)
    return Variant(plain, Switches(streaming=False, async_rewards=False))


def variants(settings: Settings, offload: OffloadRule = "off") -> dict[str, Variant]:
    """Return each mechanism alone, then the config's own setting; all but the last two rows are
    on-policy."""
    base = synchronous(settings)
    s, off = base.settings, base.switches
    eta = max(settings.tail.eta_prompts, settings.tail.eta_responses)
    tail = replace(settings.tail, eta_prompts=eta if eta > 1 else ETA, eta_responses=1.0)
    early = replace(off, async_rewards=True)
    streamed = replace(early, streaming=True)
    return {
        "synchronous": base,
        "async rewards": Variant(s, early),
        "async rewards, streaming": Variant(s, streamed),
        "offload: foreseen": Variant(s, replace(streamed, offload="foreseen")),
        "offload: window": Variant(s, replace(streamed, offload="window")),
        "migration": Variant(replace(s, migration=True), off),
        "foresight": Variant(replace(s, foresight=True), off),
        "tail: prompts": Variant(replace(s, tail=tail), off),
        "tail: both": Variant(replace(s, tail=replace(tail, eta_responses=tail.eta_prompts)), off),
        "planner": Variant(s, replace(off, planner=True)),
        "speculation": Variant(s, replace(off, speculation=True)),
        "staleness 1": Variant(replace(s, max_staleness=1), streamed),
        "as configured": configured(settings, offload),
    }


def outcome_of(variant: Variant, scenario: Scenario, fleet: SimFleet) -> SimOutcome:
    settings, switches = variant.settings, variant.switches
    if scenario.chunk_s:
        switches = replace(switches, chunk_tokens=settings.chunk_tokens, chunk_s=scenario.chunk_s)
    elif settings.prompts_launched * settings.responses_launched > LARGE_STEP:
        switches = replace(switches, chunk_tokens=8 * switches.chunk_tokens)
    world = World(settings, scenario, fleet.nodes, fleet.trace, switches, changes=fleet.changes)
    return world.run()


def figures_of(
    outcome: SimOutcome, variant: Variant, scenario: Scenario, baseline: Figures | None = None
) -> Figures:
    return figures(
        outcome,
        scenario,
        synchronous=not variant.settings.max_staleness,
        baseline_step_s=baseline.step_s if baseline is not None else None,
    )


def simulate(
    variant: Variant, scenario: Scenario, fleet: SimFleet, baseline: Figures | None = None
) -> Figures:
    return figures_of(outcome_of(variant, scenario, fleet), variant, scenario, baseline)


def compare(
    settings: Settings, scenario: Scenario, fleet: SimFleet, offload: OffloadRule = "off"
) -> dict[str, Figures]:
    """Simulate all variants that fit this scenario, with speed-ups over the first."""
    rows = variants(settings, offload)
    base = simulate(rows.pop("synchronous"), scenario, fleet)
    named = {"synchronous": replace(base, speed_up=1.0)}
    for name, variant in rows.items():
        # a colocated trainer cannot train while the next round samples
        is_async = variant.settings.max_staleness > 0
        fits = not is_async if scenario.is_colocated else variant.switches.offload == "off"
        if variant.switches.planner:
            fits &= can_group(fleet.nodes, scenario.engines)
        if fits:
            named[name] = simulate(variant, scenario, fleet, base)
    return named
