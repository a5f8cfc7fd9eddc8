"""Which systems are simulated to compare them, each a row of a table.

Owns what makes them different: mechanisms of the core that are on, what the shell around it does,
and on which devices. Every system, also those of others, is the real core with some mechanisms off:
a race by the clock with fresh noise is RollPacker's, no race and rewards after the rollout is
veRL's. Simulates nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightrl.core.settings import Tail
from lightrl.core.sharing.sharing_rules import Rule, WindowRule
from lightrl.sim.inputs.scenario import Switches
from lightrl.sim.inputs.traces import TraceEvent, always_there
from scripts.studies.published_lib.published import (
    BALANCED_SLOTS,
    ENGINES,
    ETA,
    INSTANCE_SLOTS,
    LEAST_WINDOW_S,
    PROMPTS_PER_STEP,
    RESERVED_ENGINES,
    SLOTS,
    WINDOW_S,
    Bar,
)
from scripts.studies.published_lib.rules import Held, NoWindow, Settled
from scripts.studies.published_lib.synthetic import synthetic_trace

# of the comparison: 8 short rounds and the 2 long ones that follow from them
PROMPTS_OF_EPOCH = 1280
EPOCH = PROMPTS_OF_EPOCH // PROMPTS_PER_STEP  # steps
SPARE_NODES = 4  # preemptible, beside 16 reserved ones
INSTANCES = range(1, 9)  # preemptible ones that stay
SHORT_LIMIT = 5120  # of a response
# Nobody has published how long it takes until an engine of a new instance has started; RLBoost's
# release asks for its health for 300 s at most. It is paid for.
START_S = 60.0
# steps in which a window is learned, and all; figures are those of the others
LEARNING, STEPS = 6, 12
# of six instances, so long after a step has begun
LOST, LOST_AT_S = 3, 200.0
# Of them that come and go: each stays so long on average and is away so long, so that five of six
# are there, as RLBoost's prices imply.
MOST, UP_S, DOWN_S = 6, 1800.0, 400.0
STEPS_WITH_CHANGES = 10
# instances, one number after the other, for so long each
NUMBERS, NUMBER_S = (6, 3, 5, 2) * 3, 1200.0
STEPS_WITH_NUMBERS = 20


@dataclass(frozen=True, slots=True)
class StudySwitches(Switches):
    # of the rewards: see `RewardTimes.adaptive`
    adaptive_limit: bool = False
    # False: see `surplus.py`
    surplus_ends: bool = True
    # False: a node on the trainer's machine does not verify the trainer's file
    verifies: bool = True


# Tokens are sent with a finish, immediately: the winners of a race by the clock are exact, and
# rounds are cheap.
_THEIRS = StudySwitches(
    prompt_batch=1 << 30, token_collection=False, chunk_tokens=4096, verifies=False
)
_LATE = replace(_THEIRS, streaming=False, async_rewards=False, surplus_ends=False)
_EARLY = replace(_THEIRS, streaming=False, adaptive_limit=True)
_STREAMED = replace(_EARLY, streaming=True, offload="window")
_SHARED = StudySwitches(offload="window", chunk_tokens=256, verifies=False)
_OURS = StudySwitches(adaptive_limit=True, speculation=True, offload="foreseen", chunk_tokens=256)
_PLAIN = Tail()
_BY_CLOCK = Tail(ETA, ETA, race="clock", fresh_noise=True)


@dataclass(frozen=True, slots=True)
class System:
    """One row of a table, as it is simulated."""

    name: str
    tail: Tail = _PLAIN
    switches: StudySwitches = _LATE
    rounds: int = 10
    engines: int = ENGINES
    slots: int = SLOTS
    rewards: bool = True
    foresight: bool = False
    migration: bool = False
    # preemptible nodes that come and go
    spare: int = 0
    # else nodes pull from the trainer alone
    relays: bool = True
    # a small data set, read more than once; figures without the first epoch
    epochs: bool = False
    prompts_of_epoch: int = PROMPTS_OF_EPOCH
    # figures without the first half of the steps, in which a window is learned
    learns: bool = False
    # until the engine of an instance that comes has started
    start_s: float = 0.0
    # instances that die in each step after those in which a window is learned
    lost: int = 0
    # another rule than the one that the switches name
    rule: Callable[[], Rule] | None = None
    # another limit than the workload's
    limit: int = 0
    trace: tuple[TraceEvent, ...] = ()


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
    both, prompts = Tail(ETA, ETA, deferred="continue"), Tail(ETA, deferred="continue")
    rows += _baselines(
        System("synchronous"),
        System("RollPacker", _BY_CLOCK, _STREAMED),
        _ours("LightRL full", both),
        _ours("- speculation", both, replace(_OURS, speculation=False)),
        _ours("LightRL prompts", prompts),
        _ours("LightRL strict"),
        _ours("+ spare nodes", spare=SPARE_NODES),
    )
    return {row.name: row for row in rows}


def colocated(limit: int = 0) -> System:
    """veRL on RLBoost's reserved devices."""
    name = f"{_at(limit)}colocated"
    row = System(name, rounds=STEPS, learns=True, engines=RESERVED_ENGINES, slots=INSTANCE_SLOTS)
    return replace(row, relays=False, limit=limit)


def with_instances() -> dict[str, System]:
    """Rows on RLBoost's devices: colocated, then RLBoost with so many preemptible instances."""
    rows = [colocated()]
    rows += [_boosted(f"+ {n} preemptible", instances=n) for n in INSTANCES]
    rows += [_boosted(f"+ {n}, no window", instances=n, rule=NoWindow) for n in range(1, MOST + 1)]
    rows.append(colocated(SHORT_LIMIT))
    for count in INSTANCES:
        name = f"{_at(SHORT_LIMIT)}+ {count} preemptible"
        rows.append(_boosted(name, instances=count, limit=SHORT_LIMIT))
    for name, remembers in (("with memory", True), ("without memory", False)):
        rule = partial(WindowRule, remembers=remembers)
        row = _boosted(f"changing: {name}", rule=rule, trace=_numbers(), rounds=STEPS_WITH_NUMBERS)
        rows.append(replace(row, start_s=START_S))
    for name, switches in (
        (MOVING, _SHARED),
        (STARTING_AGAIN, replace(_SHARED, token_collection=False)),
    ):
        rows.append(replace(_boosted(name, switches, MOST), lost=LOST))
    return {row.name: row for row in rows}


def _at(limit: int) -> str:
    return f"{limit} tokens: " if limit else ""


def _boosted(
    name: str,
    switches: StudySwitches = _SHARED,
    instances: int = 0,
    rounds: int = STEPS,
    rule: Callable[[], Rule] | None = None,
    limit: int = 0,
    trace: tuple[TraceEvent, ...] = (),
) -> System:
    return replace(
        colocated(limit),
        name=name,
        switches=switches,
        slots=BALANCED_SLOTS,
        rounds=rounds,
        migration=True,
        rule=rule or (None if trace else _window(instances, limit)),
        trace=trace or always_there(instances),
    )


def _window(instances: int, limit: int) -> Callable[[], Rule]:
    if limit:
        return partial(Settled, LEARNING)
    return partial(Held, WINDOW_S.get(instances, LEAST_WINDOW_S))


def _numbers() -> tuple[TraceEvent, ...]:
    events: list[TraceEvent] = []
    there = 0
    for k, count in enumerate(NUMBERS):
        low, high = sorted((there, count))
        events += [
            TraceEvent(k * NUMBER_S, f"preemptible-{n}", count > there) for n in range(low, high)
        ]
        there = count
    return tuple(events)


MOVING, STARTING_AGAIN = "three of six lost, moving", "three of six lost, starting again"
RLBOOST_ROW, FULL, STRICT = "RLBoost", "LightRL, prompts", "LightRL, off"


def extra() -> dict[str, System]:
    """On the same preemptible instances, which come and go: RLBoost, LightRL's modes that do not
    bias lengths, and each mechanism alone on top of RLBoost, and without it, last."""
    trace = synthetic_trace(MOST, 36_000.0, UP_S, DOWN_S)
    base = replace(
        _boosted(RLBOOST_ROW, rounds=STEPS_WITH_CHANGES, trace=trace),
        learns=False,
        epochs=True,
        prompts_of_epoch=PROMPTS_PER_STEP * STEPS_WITH_CHANGES // 2,
        start_s=START_S,
    )
    prompts = Tail(ETA, deferred="continue")
    full = replace(
        base,
        name=FULL,
        tail=prompts,
        switches=replace(_OURS, adaptive_limit=False),
        foresight=True,
        relays=True,
    )
    spoken = replace(_SHARED, speculation=True)
    silent = replace(full.switches, speculation=False)
    by_window = replace(full.switches, offload="window")
    rows = [
        replace(colocated(), epochs=True, rounds=STEPS_WITH_CHANGES, learns=False,
                prompts_of_epoch=base.prompts_of_epoch),
        base,
        full,
        replace(full, name=STRICT, tail=_PLAIN),
        replace(base, name="+ foreseen", switches=replace(_SHARED, offload="foreseen")),
        replace(full, name="- foreseen", switches=by_window),
        replace(base, name="+ foresight", foresight=True),
        replace(full, name="- foresight", foresight=False),
        replace(base, name="+ race of prompts", tail=prompts),
        replace(base, name="+ speculation", switches=spoken),
        replace(full, name="- speculation", switches=silent),
        replace(base, name="+ relays", relays=True),
        replace(full, name="- relays", relays=False),
    ]  # fmt: skip
    return {row.name: row for row in rows}


def _ours(
    name: str, tail: Tail = _PLAIN, switches: StudySwitches = _OURS, spare: int = 0
) -> System:
    """LightRL: its devices change sides by the core's own rule."""
    return System(
        name, tail, switches, foresight=True, migration=True, spare=spare, start_s=START_S
    )


def _baselines(*rows: System) -> list[System]:
    return [replace(row, epochs=True, rounds=2 * EPOCH) for row in rows]


def _bar(bar: Bar) -> System:
    """Whole periods: with eta prompts one long round follows 1 / (eta - 1) short ones."""
    tail = Tail(bar.eta_prompts, bar.eta_responses, race="clock", fresh_noise=True)
    period = 1 + round(1 / (bar.eta_prompts - 1)) if bar.eta_prompts > 1 else 1
    rounds = period * round(24 / period) if period > 1 else 12 if bar.eta_responses < 1.2 else 40
    return System(bar.name, tail, replace(_LATE, surplus_ends=True), rounds, rewards=False)
