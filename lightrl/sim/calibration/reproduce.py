"""`lightrl simulate --reproduce`: published figures again, and LightRL on the same workloads.

Owns which systems are simulated for that, and how long. Each workload has one set of parameters for
all its rows (`scenario.PRESETS`). Every system, also those of others, is the real core with some
mechanisms off: a race by the clock with fresh noise is RollPacker's, no race and rewards after the
rollout is veRL's. Repeatable: every row has its own seeds, whatever order the processes finish in.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from statistics import fmean
from typing import Literal

from lightrl.core.settings import Settings, Tail
from lightrl.messages import Sampling
from lightrl.sim.calibration.published import (
    ENGINES,
    ETA,
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    SLOTS,
    STUDIES,
    Bar,
    Study,
)
from lightrl.sim.machines import NodeSpec
from lightrl.sim.report import Figures, figures
from lightrl.sim.scenario import PRESETS, Switches
from lightrl.sim.traces import synthetic_trace
from lightrl.sim.workload import LengthModel, RewardTimes
from lightrl.sim.world import World

# of the comparison: 8 short rounds and the 2 long ones that follow from them
PROMPTS_OF_EPOCH = 1280
EPOCH = PROMPTS_OF_EPOCH // PROMPTS_PER_STEP  # steps
SPARE_NODES = 4  # preemptible, beside 16 reserved ones
SPARE_UP_S, SPARE_DOWN_S, SPARE_START_S = 1200.0, 300.0, 60.0  # each of them, on average

# Tokens are told with a finish, at once: what wins a race by the clock is exact, and rounds are
# cheap.
_THEIRS = Switches(exact_finishes=True, token_collection=False, chunk_tokens=4096)
_LATE = replace(_THEIRS, streaming=False, async_rewards=False, surplus_ends=False)
_EARLY = replace(_THEIRS, streaming=False, adaptive_limit=True)
_STREAMED = replace(_EARLY, streaming=True, offload="window")
_OURS = Switches(adaptive_limit=True, offload="foreseen", speculation=True, chunk_tokens=256)
_PLAIN = Tail()
_BY_CLOCK = Tail(ETA, ETA, race="clock", fresh_noise=True)


@dataclass(frozen=True, slots=True)
class System:
    """One row of a table, as it is simulated."""

    name: str
    tail: Tail = _PLAIN
    switches: Switches = _LATE
    rounds: int = 10
    rewards: bool = True
    # foresight and migration
    ours: bool = False
    # preemptible nodes
    spare: int = 0
    # a small data set, read more than once; figures without the first epoch
    epochs: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    workload: str
    system: System
    seed: int


@dataclass(frozen=True, slots=True)
class Played:
    figures: Figures
    # first letters of the rounds' kinds
    kinds: str
    cost_per_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """One published figure again."""

    name: str
    published: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


@dataclass(frozen=True, slots=True)
class Rival:
    """One system on a workload; means over its seeds."""

    name: str
    step_s: float
    # over the synchronous baseline
    speed_up: float
    share_of_bound: float
    kept_mean: float
    true_mean: float
    kept_at_limit: float
    true_at_limit: float
    wasted_share: float
    cost_per_step: float

    @property
    def bias(self) -> float:
        return self.kept_mean / self.true_mean - 1


@dataclass(frozen=True)
class Reproduction:
    """All of one workload."""

    workload: str
    checks: list[Check]
    # kinds of RollPacker's rounds
    period: str
    rivals: list[Rival]
    parameters: dict[str, object] = field(default_factory=dict[str, object])


def systems(bars: Sequence[Bar]) -> dict[str, System]:
    """All rows of both tables, by name."""
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
    rows += rivals(
        System("synchronous"),
        System("RollPacker", _BY_CLOCK, _STREAMED),
        System("LightRL full", both, _OURS, ours=True),
        System("- speculation", both, replace(_OURS, speculation=False), ours=True),
        System("LightRL prompts", prompts, _OURS, ours=True),
        System("LightRL strict", switches=_OURS, ours=True),
        System("+ spare nodes", switches=_OURS, ours=True, spare=SPARE_NODES),
    )
    return {row.name: row for row in rows}


def rivals(*rows: System) -> list[System]:
    return [replace(row, epochs=True, rounds=2 * EPOCH) for row in rows]


def _bar(bar: Bar) -> System:
    """Whole periods: with eta prompts one long round follows 1 / (eta - 1) short ones."""
    tail = Tail(bar.eta_prompts, bar.eta_responses, race="clock", fresh_noise=True)
    period = 1 + round(1 / (bar.eta_prompts - 1)) if bar.eta_prompts > 1 else 1
    rounds = period * round(24 / period) if period > 1 else 12 if bar.eta_responses < 1.2 else 40
    return System(bar.name, tail, replace(_LATE, surplus_ends=True), rounds, rewards=False)


def play(job: Setting) -> Played:
    """Simulates one row."""
    system, scenario = job.system, PRESETS[job.workload]()
    workload = scenario.workload
    lengths = workload.lengths
    assert isinstance(lengths, LengthModel)
    reward = replace(workload.reward, seed=job.seed) if system.rewards else RewardTimes()
    workload = replace(workload, lengths=replace(lengths, seed=job.seed), reward=reward)
    if system.epochs:
        workload = replace(workload, num_prompts=PROMPTS_OF_EPOCH)
    scenario = replace(
        scenario, workload=workload, transfer=replace(scenario.transfer, start_s=SPARE_START_S)
    )
    settings = Settings(
        run_seed=job.seed,
        num_steps=system.rounds,
        prompts_per_step=PROMPTS_PER_STEP,
        group_size=GROUP_SIZE,
        max_response_tokens=lengths.cap,
        sampling=Sampling(1.0),
        eval_interval=0,
        num_eval_prompts=0,
        eval_samples=1,
        eval_sampling=Sampling(0.0),
        slots=SLOTS,
        vocabulary=1,
        lease_s=5.0,
        reward_on_failure=None,
        num_prompts=workload.num_prompts,
        tail=system.tail,
        foresight=system.ours,
        migration=system.ours,
    )
    nodes = [NodeSpec(f"node-{k:02}", SLOTS) for k in range(ENGINES)]
    trace = ()
    if system.spare:
        trace = synthetic_trace(
            system.spare, system.rounds * 600.0, SPARE_UP_S, SPARE_DOWN_S, job.seed
        )
    outcome = World(settings, scenario, nodes, trace, system.switches).run()
    kinds = "".join(step.kind[0] for step in outcome.steps)
    if system.epochs:
        outcome.steps = outcome.steps[system.rounds // 2 :]
    f = figures(outcome, scenario)
    return Played(f, kinds, f.cost / outcome.elapsed_s)


def reproduce(
    studies: Iterable[Study] = STUDIES,
    seeds: Sequence[int] = (0, 1),
    only: Sequence[str] | None = None,
    processes: int | None = None,
) -> list[Reproduction]:
    """Both tables of every study; `only` these rows of them, and with them what can be told from
    those."""
    studies = list(studies)
    jobs = [
        Setting(study.workload, system, seed)
        for study in studies
        for system in systems(study.bars).values()
        for seed in (seeds[:1] if system.epochs else seeds)
        if only is None or system.name in only
    ]
    jobs.sort(key=lambda job: -job.system.rounds)  # the longest first
    processes = min(len(jobs), processes or os.cpu_count() or 1)
    if processes > 1:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            played = list(pool.map(play, jobs))
    else:
        played = [play(job) for job in jobs]
    found: dict[tuple[str, str], list[Played]] = {}
    for job, result in zip(jobs, played, strict=True):
        found.setdefault((job.workload, job.system.name), []).append(result)
    return [
        _told(study, {n: p for (w, n), p in found.items() if w == study.workload})
        for study in studies
    ]


def _told(study: Study, found: Mapping[str, list[Played]]) -> Reproduction:
    checks = [
        Check(f"{bar.name}: rollout s", bar.rollout_s, _seconds(found[bar.name], "rollout_s"))
        for bar in study.bars
        if bar.name in found
    ]
    if {"veRL", "+ stream trainer"} <= set(found):
        checks += _table_2(study, found)
    full = found.get("+ stream trainer") or found.get("RollPacker") or []
    compared = [_rival(s.name, found) for s in systems(()).values() if s.epochs and s.name in found]
    return Reproduction(
        study.workload, checks, full[0].kinds if full else "", compared, _parameters(study)
    )


def _table_2(study: Study, found: Mapping[str, list[Played]]) -> list[Check]:
    verl = _seconds(found["veRL"], "step_s")
    full = found["+ stream trainer"]
    published = {
        "+ tail batching": study.tail_batching,
        "+ reward scheduler": study.reward_scheduler,
        "+ planner": study.planner,
        "+ stream trainer": study.stream_trainer,
    }
    checks = [
        Check(f"{name}: speed-up", value, verl / _seconds(found[name], "step_s"))
        for name, value in published.items()
        if name in found
    ]
    fuse = _seconds(found["RLHFuse, strengthened"], "step_s") / _seconds(full, "step_s")
    checks += [
        Check("all of it over strengthened RLHFuse", study.over_rlhfuse, fuse),
        Check("short rounds: step s", study.short_s, _seconds(full, "step_s", "short")),
        Check("long rounds: step s", study.long_s, _seconds(full, "step_s", "long")),
        Check("veRL: step s (implied, not published)", study.verl_s, verl),
    ]
    return checks


def _seconds(
    played: Sequence[Played], what: Literal["step_s", "rollout_s"], only_kind: str | None = None
) -> float:
    """Mean over rounds of all kinds, or of one."""
    kinds = [
        (name, k)
        for p in played
        for name, k in p.figures.kinds.items()
        if only_kind in {None, name}
    ]
    rounds = sum(k.rounds for _, k in kinds)
    return (
        sum(k.rounds * (k.step_s if what == "step_s" else k.rollout_s) for _, k in kinds) / rounds
    )


def _rival(name: str, found: Mapping[str, list[Played]]) -> Rival:
    mine = [p.figures for p in found[name]]
    step_s = fmean(f.step_s for f in mine)
    base = found.get("synchronous", found[name])
    return Rival(
        name=name,
        step_s=step_s,
        speed_up=fmean(p.figures.step_s for p in base) / step_s,
        share_of_bound=fmean(f.bound_s for f in mine) / step_s,
        kept_mean=fmean(f.kept_mean for f in mine),
        true_mean=fmean(f.true_mean for f in mine),
        kept_at_limit=fmean(f.kept_at_limit for f in mine),
        true_at_limit=fmean(f.true_at_limit for f in mine),
        wasted_share=fmean(f.wasted_share for f in mine),
        cost_per_step=fmean(p.cost_per_s for p in found[name]) * step_s,
    )


def _parameters(study: Study) -> dict[str, object]:
    scenario = PRESETS[study.workload]()
    return {
        "lengths": scenario.workload.lengths,
        "reward": scenario.workload.reward,
        "engine": scenario.engine,
        "training": scenario.training,
        "transfer": scenario.transfer,
        "speculation": scenario.speculation,
        "prices": scenario.prices,
    }
