"""`lightrl simulate`: a config and a few options in, tables or one line of JSON out."""

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lightrl.config import Config
from lightrl.core_settings import settings_of
from lightrl.errors import SimError
from lightrl.sim.baselines import compare, configured, simulate, synchronous
from lightrl.sim.calibration import report
from lightrl.sim.calibration.reproduce import reproduce
from lightrl.sim.machines import NodeSpec
from lightrl.sim.report import as_json, comparison, tables
from lightrl.sim.scenario import PRESETS, OffloadRule, find_scenario
from lightrl.sim.traces import read_trace
from lightrl.sim.workload import LengthModel
from lightrl.system.output import show

WIDTH = 110
STEPS = 20  # enough for four periods of tail batching


def simulate_run(
    config: Config,
    *,
    num_prompts: int | None,
    nodes: int | None = None,
    trace: Path | None = None,
    workload: str = "",
    steps: int | None = None,
    offload: OffloadRule = "off",
    all_variants: bool = False,
    json_line: bool = False,
) -> None:
    """Prints what a run of this config would do. Raises SimError, one line, for what cannot be."""
    limit = config.rollout.max_response_length
    scenario = find_scenario(workload, limit, config.run.seed)
    events = read_trace(trace) if trace is not None else ()
    if nodes is None:
        nodes = 0 if events else config.rollout.nodes
    fleet = [NodeSpec(f"node-{k}", config.rollout.slots) for k in range(nodes)]
    if not fleet and not events:
        raise SimError("a simulation needs nodes: --nodes N, --trace FILE or rollout.nodes")
    if num_prompts and isinstance(scenario.workload.lengths, LengthModel):
        scenario = replace(scenario, workload=replace(scenario.workload, num_prompts=num_prompts))
    settings = settings_of(config, scenario.workload.num_prompts)
    if scenario.training.placement == "colocated" and settings.max_staleness:
        raise SimError(
            "async.max_staleness: a trainer on the rollout nodes cannot work beside them"
        )
    if scenario.training.placement == "dedicated" and offload != "off":
        raise SimError(f"--offload {offload}: the trainer of this workload has its own devices")
    num_steps = steps if steps is not None else min(STEPS, config.train.steps)
    settings = replace(settings, num_steps=num_steps)
    speculates = config.speculates and scenario.has_speculated
    if all_variants:
        named = compare(settings, scenario, fleet, events, speculates, offload)
    else:
        base = simulate(synchronous(settings), scenario, fleet, events)
        named = {
            "as configured": simulate(
                configured(settings, speculates, offload), scenario, fleet, events, base
            )
        }
    if json_line:
        print(json.dumps(as_json(named)))
        return
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    responses = settings.prompts_per_step * settings.group_size
    spot = f" and those of {trace}" if trace is not None else ""
    print(
        f"{num_steps} steps of {settings.prompts_per_step} prompts x {settings.group_size} = "
        f"{responses:,} responses of at most {limit:,} tokens, on {nodes} nodes x "
        f"{config.rollout.slots} slots{spot}"
    )
    show([f"workload   {scenario.workload.name}; {scenario.training.placement} trainer"])
    if scenario.workload.note:
        show([f"note       {scenario.workload.note}"])
    print()
    for part in comparison(named) if all_variants else tables(named["as configured"]):
        console.print(part)


def reproduce_published(*, json_line: bool = False) -> None:
    """Prints published figures beside those of the simulator, and LightRL on the same workloads."""
    results = reproduce()
    if json_line:
        print(json.dumps(report.as_json(results)))
        return
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    acceptance = PRESETS[results[0].workload]().speculation.acceptance
    console.print(report.NOTES.format(acceptance=acceptance) + "\n")
    for result in results:
        for part in report.tables(result):
            console.print(part)
