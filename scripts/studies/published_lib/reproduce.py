"""Simulates published figures again, and LightRL on the same workloads.

Simulates the rows of `systems.py` and computes their checks. Each workload has one
set of parameters for all its rows (`scenario.PRESETS`). Repeatable: every row has its own seeds,
whatever order the processes finish in.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from statistics import fmean
from typing import Literal

from lightrl.core.settings import Settings
from lightrl.messages.responses import Sampling
from lightrl.sim.inputs.nodes import NodeSpec
from lightrl.sim.inputs.scenario import PRESETS, Scenario
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import LengthModel, RewardTimes
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.report import figures
from lightrl.sim.world import World
from scripts.studies.published_lib.instances import checks_extra, checks_of
from scripts.studies.published_lib.losses import Losses
from scripts.studies.published_lib.published import (
    ENGINES,
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    RLBOOST,
    STUDIES,
    Instances,
    Study,
)
from scripts.studies.published_lib.simulated import Check, Setting, Simulated
from scripts.studies.published_lib.surplus import Surplus
from scripts.studies.published_lib.synthetic import synthetic_trace
from scripts.studies.published_lib.systems import LOST_AT_S, extra, systems, with_instances

# Decisions are as often as they may be at one percent of a machine's time, which in virtual time is
# most of a simulation's. With steps of hundreds of seconds, so many times rarer is often enough.
LOOK_PAUSE = 8.0
EXTRA = ", extra"  # after the name of a workload: not published
SPARE_UP_S, SPARE_DOWN_S = 1200.0, 300.0  # each of them, on average


@dataclass(frozen=True, slots=True)
class Baseline:
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
    baselines: list[Baseline]
    parameters: dict[str, object] = field(default_factory=dict[str, object])


def simulate(job: Setting) -> Simulated:
    """Simulates one row."""
    system, scenario = job.system, _scenario(job)
    trace = system.trace
    if system.spare:
        trace = synthetic_trace(
            system.spare, system.rounds * 600.0, SPARE_UP_S, SPARE_DOWN_S, job.seed
        )
    outcome = _run(job, scenario, trace)
    kinds = "".join(step.kind[0] for step in outcome.steps)
    if system.epochs or system.learns:
        outcome.steps = outcome.steps[system.rounds // 2 :]
    f = figures(outcome, scenario)
    return Simulated(f, kinds, f.cost / outcome.elapsed_s)


def _run(job: Setting, scenario: Scenario, trace: Sequence[TraceEvent]) -> SimOutcome:
    system, workload = job.system, scenario.workload
    settings = Settings(
        run_seed=job.seed,
        num_steps=system.rounds,
        prompts_per_step=PROMPTS_PER_STEP,
        group_size=GROUP_SIZE,
        max_response_tokens=_lengths(scenario).cap,
        sampling=Sampling(1.0),
        slots=system.slots,
        vocabulary=1,
        lease_s=5.0,
        reward_on_failure=None,
        num_prompts=workload.num_prompts,
        tail=system.tail,
        foresight=system.foresight,
        migration=system.migration,
        look_pause=LOOK_PAUSE,
    )
    nodes = [NodeSpec(f"node-{k:02}", system.slots) for k in range(system.engines)]
    world = World(settings, scenario, nodes, trace, system.switches)
    if system.rule is not None:
        world.core.policy.rule = system.rule()
    if not system.switches.surplus_ends:
        Surplus(world)
    if system.lost:
        Losses(world, system.lost, LOST_AT_S, system.rounds // 2)
    return world.run()


def _scenario(job: Setting) -> Scenario:
    """The preset, as this system uses it."""
    system, scenario = job.system, PRESETS[job.workload.removesuffix(EXTRA)]()
    workload, lengths = scenario.workload, _lengths(scenario)
    switches = system.switches
    reward = replace(workload.reward, seed=job.seed) if system.rewards else RewardTimes()
    reward = replace(reward, adaptive=switches.adaptive_limit)
    lengths = replace(lengths, seed=job.seed, cap=system.limit or lengths.cap)
    workload = replace(workload, lengths=lengths, reward=reward)
    if system.epochs:
        workload = replace(workload, num_prompts=system.prompts_of_epoch)
    transfer = replace(scenario.transfer, start_s=system.start_s, relays=system.relays)
    if not switches.verifies:
        transfer = replace(transfer, file_bytes_per_s=math.inf)
    return replace(scenario, workload=workload, transfer=transfer)


def _lengths(scenario: Scenario) -> LengthModel:
    lengths = scenario.workload.lengths
    assert isinstance(lengths, LengthModel)
    return lengths


def reproduce(
    studies: Iterable[Study] = STUDIES,
    instances: Iterable[Instances] = (RLBOOST,),
    seeds: Sequence[int] = (0, 1),
    only: Sequence[str] | None = None,
    processes: int | None = None,
) -> list[Reproduction]:
    """Return all tables of all workloads; `only`: of these rows alone."""
    studies, instances = list(studies), list(instances)
    rows = [(s.workload, row) for s in studies for row in systems(s.bars).values()]
    rows += [(i.workload, row) for i in instances for row in with_instances().values()]
    rows += [(i.workload + EXTRA, row) for i in instances for row in extra().values()]
    jobs = [
        Setting(workload, system, seed)
        for workload, system in rows
        for seed in (seeds[:1] if system.epochs or system.engines != ENGINES else seeds)
        if only is None or system.name in only
    ]
    jobs.sort(key=lambda job: -job.system.rounds)  # the longest first
    processes = min(len(jobs), processes or os.cpu_count() or 1)
    if processes > 1:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            simulated = list(pool.map(simulate, jobs))
    else:
        simulated = [simulate(job) for job in jobs]
    found: dict[str, dict[str, list[Simulated]]] = {}
    for job, result in zip(jobs, simulated, strict=True):
        found.setdefault(job.workload, {}).setdefault(job.system.name, []).append(result)
    return [
        *(_of_study(study, found[study.workload]) for study in studies if study.workload in found),
        *(_of_instances(i, found[i.workload]) for i in instances if i.workload in found),
        *(
            _of_extra(i, found[i.workload + EXTRA])
            for i in instances
            if i.workload + EXTRA in found
        ),
    ]


def _of_study(study: Study, found: Mapping[str, list[Simulated]]) -> Reproduction:
    checks = [
        Check(f"{bar.name}: rollout s", bar.rollout_s, _seconds(found[bar.name], "rollout_s"))
        for bar in study.bars
        if bar.name in found
    ]
    if {"veRL", "+ stream trainer"} <= set(found):
        checks += _table_2(study, found)
    full = found.get("+ stream trainer") or found.get("RollPacker") or []
    compared = [
        _baseline(s.name, found) for s in systems(()).values() if s.epochs and s.name in found
    ]
    kinds = full[0].kinds if full else ""
    return Reproduction(study.workload, checks, kinds, compared, _parameters(study.workload))


def _of_instances(instances: Instances, found: Mapping[str, list[Simulated]]) -> Reproduction:
    rows = [_baseline(name, found, "colocated") for name in with_instances() if name in found]
    checks, name = checks_of(instances, found), instances.workload
    return Reproduction(name, checks, "", rows, _parameters(name))


def _of_extra(instances: Instances, found: Mapping[str, list[Simulated]]) -> Reproduction:
    rows = [_baseline(name, found, "colocated") for name in extra() if name in found]
    return Reproduction(instances.workload + EXTRA, checks_extra(found), "", rows)


def _table_2(study: Study, found: Mapping[str, list[Simulated]]) -> list[Check]:
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
    simulated: Sequence[Simulated],
    what: Literal["step_s", "rollout_s"],
    only_kind: str | None = None,
) -> float:
    """Mean over rounds of all kinds, or of one."""
    kinds = [
        (name, k)
        for p in simulated
        for name, k in p.figures.kinds.items()
        if only_kind in {None, name}
    ]
    rounds = sum(k.rounds for _, k in kinds)
    return (
        sum(k.rounds * (k.step_s if what == "step_s" else k.rollout_s) for _, k in kinds) / rounds
    )


def _baseline(
    name: str, found: Mapping[str, list[Simulated]], against: str = "synchronous"
) -> Baseline:
    mine = [p.figures for p in found[name]]
    step_s = fmean(f.step_s for f in mine)
    base = found.get(against, found[name])
    return Baseline(
        name=name,
        step_s=step_s,
        speed_up=fmean(p.step_s for p in base) / step_s,
        share_of_bound=fmean(f.bound_s for f in mine) / step_s,
        kept_mean=fmean(f.kept_mean for f in mine),
        true_mean=fmean(f.true_mean for f in mine),
        kept_at_limit=fmean(f.kept_at_limit for f in mine),
        true_at_limit=fmean(f.true_at_limit for f in mine),
        wasted_share=fmean(f.wasted_share for f in mine),
        cost_per_step=fmean(p.cost_per_s for p in found[name]) * step_s,
    )


def _parameters(workload: str) -> dict[str, object]:
    scenario = PRESETS[workload]()
    return {
        "lengths": scenario.workload.lengths,
        "reward": scenario.workload.reward,
        "engine": scenario.engine,
        "training": scenario.training,
        "transfer": scenario.transfer,
        "speculation": scenario.speculation,
        "prices": scenario.prices,
    }
