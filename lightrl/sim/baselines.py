"""What a run is compared with: the synchronous baseline, and each mechanism alone on top of it.

Owns the simulator's switches for what a config says, and the table of variants. Simulates them;
prints nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightrl.core.settings import Settings, Tail
from lightrl.sim.machines import NodeChanges, NodeSpec, can_group
from lightrl.sim.outcome import Outcome
from lightrl.sim.report import Figures, figures
from lightrl.sim.scenario import OffloadRule, Scenario, Switches
from lightrl.sim.traces import TraceEvent
from lightrl.sim.world import World

LARGE_STEP = 4096  # responses; of larger steps tokens are reported in larger chunks, for speed
ETA = 1.25  # of tail batching where the config has it off


@dataclass(frozen=True, slots=True)
class Variant:
    settings: Settings
    switches: Switches


def configured(
    settings: Settings, speculates: bool = False, offload: OffloadRule = "off"
) -> Variant:
    """What the config says, and by which rule shared devices change sides."""
    return Variant(settings, Switches(speculation=speculates, offload=offload))


def synchronous(settings: Settings) -> Variant:
    """As verl works: plain rounds, then all rewards, then training; no response ever moves by
    choice."""
    plain = replace(settings, tail=Tail(), max_staleness=0, foresight=False, migration=False)
    return Variant(plain, Switches(streaming=False, async_rewards=False))


def variants(
    settings: Settings, speculates: bool = False, offload: OffloadRule = "off"
) -> dict[str, Variant]:
    """Each mechanism alone, then what the config says; all but the last rows are on-policy."""
    base = synchronous(settings)
    s, off = base.settings, base.switches
    eta = max(settings.tail.eta_prompts, settings.tail.eta_responses)
    tail = replace(settings.tail, eta_prompts=eta if eta > 1 else ETA, eta_responses=1.0)
    early = replace(off, async_rewards=True)
    return {
        "synchronous": base,
        "rewards at once": Variant(s, early),
        "rewards at once, streaming": Variant(s, replace(early, streaming=True)),
        "offload: foreseen": Variant(s, replace(early, streaming=True, offload="foreseen")),
        "offload: window": Variant(s, replace(early, streaming=True, offload="window")),
        "migration": Variant(replace(s, migration=True), off),
        "foresight": Variant(replace(s, foresight=True), off),
        "tail: prompts": Variant(replace(s, tail=tail), off),
        "tail: both": Variant(replace(s, tail=replace(tail, eta_responses=tail.eta_prompts)), off),
        "planner": Variant(s, replace(off, planner=True)),
        "speculation": Variant(s, replace(off, speculation=True)),
        "staleness 1": Variant(replace(s, max_staleness=1), replace(early, streaming=True)),
        "as configured": configured(settings, speculates, offload),
    }


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who samples: nodes that are always there, others by a trace, and as nodes of a run did."""

    nodes: Sequence[NodeSpec]
    trace: Sequence[TraceEvent] = ()
    changes: NodeChanges | None = None


def outcome_of(variant: Variant, scenario: Scenario, fleet: Fleet) -> Outcome:
    settings, switches = variant.settings, variant.switches
    if scenario.chunk_s:
        chunks = {"chunk_tokens": settings.chunk_tokens, "chunk_s": scenario.chunk_s}
        switches = replace(switches, **chunks)
    elif settings.prompts_launched * settings.responses_launched > LARGE_STEP:
        switches = replace(switches, chunk_tokens=8 * switches.chunk_tokens)
    world = World(settings, scenario, fleet.nodes, fleet.trace, switches, changes=fleet.changes)
    return world.run()


def simulate(
    variant: Variant, scenario: Scenario, fleet: Fleet, baseline: Figures | None = None
) -> Figures:
    return figures_of(outcome_of(variant, scenario, fleet), variant, scenario, baseline)


def figures_of(
    outcome: Outcome, variant: Variant, scenario: Scenario, baseline: Figures | None = None
) -> Figures:
    return figures(
        outcome,
        scenario,
        synchronous=not variant.settings.max_staleness,
        baseline_step_s=baseline.step_s if baseline is not None else None,
    )


def compare(
    settings: Settings,
    scenario: Scenario,
    fleet: Fleet,
    speculates: bool = False,
    offload: OffloadRule = "off",
) -> dict[str, Figures]:
    """All variants, with speed-ups over the first."""
    rows = variants(settings, speculates, offload)
    base = simulate(rows.pop("synchronous"), scenario, fleet)
    named = {"synchronous": replace(base, speed_up=1.0)}
    for name, variant in rows.items():
        is_colocated = scenario.training.placement == "colocated"
        if variant.settings.max_staleness and is_colocated:
            continue  # the trainer has no device of its own on which it could work at the same time
        if variant.switches.offload != "off" and not is_colocated:
            continue  # it has, and nobody changes sides
        if variant.switches.planner and not can_group(fleet.nodes, scenario.engines):
            continue  # there is one size of engines, or the nodes cannot be grouped by others
        named[name] = simulate(variant, scenario, fleet, base)
    return named
