"""Which systems are simulated to compare them, each a row of a table.

Owns what makes them different: mechanisms of the core that are on, what the shell around it does,
and on which devices. Every system, also those of others, is the real core with some mechanisms off:
a race by the clock with fresh noise is RollPacker's, no race and rewards after the rollout is
veRL's. Simulates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightrl.core.settings import Tail
from lightrl.sim.calibration.published import (
    ENGINES,
    ETA,
    INSTANCE_SLOTS,
    PROMPTS_PER_STEP,
    RESERVED_ENGINES,
    SLOTS,
    Bar,
)
from lightrl.sim.scenario import Switches

# of the comparison: 8 short rounds and the 2 long ones that follow from them
PROMPTS_OF_EPOCH = 1280
EPOCH = PROMPTS_OF_EPOCH // PROMPTS_PER_STEP  # steps
SPARE_NODES = 4  # preemptible, beside 16 reserved ones
INSTANCES = range(1, 7)  # preemptible ones that stay

# Tokens are told with a finish, at once: what wins a race by the clock is exact, and rounds are
# cheap.
_THEIRS = Switches(exact_finishes=True, token_collection=False, chunk_tokens=4096, proves=False)
_LATE = replace(_THEIRS, streaming=False, async_rewards=False, surplus_ends=False)
_EARLY = replace(_THEIRS, streaming=False, adaptive_limit=True)
_STREAMED = replace(_EARLY, streaming=True, offload="window")
_SHARED = Switches(offload="window", chunk_tokens=256, proves=False)
_OURS = Switches(adaptive_limit=True, speculation=True, chunk_tokens=256)
_PLAIN = Tail()
_BY_CLOCK = Tail(ETA, ETA, race="clock", fresh_noise=True)


@dataclass(frozen=True, slots=True)
class System:
    """One row of a table, as it is simulated."""

    name: str
    tail: Tail = _PLAIN
    switches: Switches = _LATE
    rounds: int = 10
    engines: int = ENGINES
    slots: int = SLOTS
    rewards: bool = True
    foresight: bool = False
    migration: bool = False
    # half of the devices train and the others sample; else all do both, in turn
    split: bool = False
    # preemptible nodes that come and go, and such that stay
    spare: int = 0
    instances: int = 0
    # else nodes pull from the trainer alone
    relays: bool = True
    # a small data set, read more than once; figures without the first epoch
    epochs: bool = False
    # figures without the first half of the steps, in which a window is learned
    learns: bool = False


def systems(bars: Sequence[Bar]) -> dict[str, System]:
    """All rows of RollPacker's tables and of the comparison with it, by name."""
    rows = [_bar(b) for b in bars]
    rows += [
        System("veRL", rounds=8),
        System("+ tail batching", _BY_CLOCK),
        System("+ reward scheduler", _BY_CLOCK, _EARLY),
        System("+ planner", _BY_CLOCK, replace(_EARLY, planner=True)),
        System("+ stream trainer", _BY_CLOCK, _STREAMED),
        System("RLHFuse, strengthened", switches=_STREAMED, rounds=8),
    ]
    both, prompts = Tail(ETA, ETA), Tail(ETA)
    rows += _rivals(
        System("synchronous"),
        System("RollPacker", _BY_CLOCK, _STREAMED),
        _ours("LightRL full", both),
        _ours("- speculation", both, replace(_OURS, speculation=False)),
        _ours("LightRL prompts", prompts),
        _ours("LightRL strict"),
        _ours("+ spare nodes", spare=SPARE_NODES),
    )
    return {row.name: row for row in rows}


def with_instances() -> dict[str, System]:
    """Rows on RLBoost's devices: colocated, then with so many preemptible instances."""
    colocated = System(
        "colocated",
        rounds=8,
        learns=True,
        engines=RESERVED_ENGINES,
        slots=INSTANCE_SLOTS,
        relays=False,
    )
    rows = [colocated]
    for count in INSTANCES:
        name = f"+ {count} preemptible"
        rows.append(
            replace(colocated, name=name, switches=_SHARED, migration=True, instances=count)
        )
    return {row.name: row for row in rows}


def _ours(name: str, tail: Tail = _PLAIN, switches: Switches = _OURS, spare: int = 0) -> System:
    """LightRL as it is: no device changes sides."""
    row = System(name, tail, switches, foresight=True, migration=True, spare=spare)
    return replace(row, split=True, engines=ENGINES // 2, slots=2 * SLOTS)


def _rivals(*rows: System) -> list[System]:
    return [replace(row, epochs=True, rounds=2 * EPOCH) for row in rows]


def _bar(bar: Bar) -> System:
    """Whole periods: with eta prompts one long round follows 1 / (eta - 1) short ones."""
    tail = Tail(bar.eta_prompts, bar.eta_responses, race="clock", fresh_noise=True)
    period = 1 + round(1 / (bar.eta_prompts - 1)) if bar.eta_prompts > 1 else 1
    rounds = period * round(24 / period) if period > 1 else 12 if bar.eta_responses < 1.2 else 40
    return System(bar.name, tail, replace(_LATE, surplus_ends=True), rounds, rewards=False)
