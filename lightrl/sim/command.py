"""`lightrl simulate`: a config and a few options in, tables or one line of JSON out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from lightrl.config.schema import Config
from lightrl.core.settings import Settings
from lightrl.core_settings import settings_of
from lightrl.errors import SimError
from lightrl.sim.fleet.messages import TRAINER
from lightrl.sim.inputs.files import find_scenario
from lightrl.sim.inputs.hardware import SimPrices
from lightrl.sim.inputs.nodes import NodeSpec
from lightrl.sim.inputs.recorded import read_run
from lightrl.sim.inputs.scenario import OffloadRule, Scenario
from lightrl.sim.inputs.traces import TraceEvent, always_there, cut, read_trace, sample
from lightrl.sim.inputs.workload import LengthModel
from lightrl.sim.prediction import Rerun
from lightrl.sim.report import as_json, comparison, tables
from lightrl.sim.variants import (
    SimFleet,
    compare,
    configured,
    figures_of,
    outcome_of,
    simulate,
    synchronous,
)
from lightrl.system.output import show
from lightrl.wire import to_json

WIDTH = 110
STEPS = 20  # enough for four periods of tail batching
COLOCATED = "note       nodes that are always there sample, then train; with --offload within steps"


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The nodes, as options of the command line."""

    # rollout nodes that stay; None = by trace and config
    nodes: int | None = None
    # preemptible nodes that stay
    preemptible: int = 0
    trace: Path | None = None
    # of the trace's nodes
    share: float | None = None
    # seconds of the trace
    from_s: float | None = None
    to_s: float | None = None

    @property
    def adds_only(self) -> bool:
        """Return whether they add nodes, and replace none."""
        return self == FleetOptions(preemptible=self.preemptible)

    @property
    def text(self) -> str:
        """Return the options as on the command line. Example: "--nodes 8"."""
        options = {
            "nodes": self.nodes,
            "preemptible": self.preemptible or None,
            "trace": self.trace,
            "trace-share": self.share,
            "trace-from": self.from_s,
            "trace-to": self.to_s,
        }
        return " ".join(f"--{name} {value}" for name, value in options.items() if value is not None)


@dataclass(frozen=True)
class _Job:
    settings: Settings
    scenario: Scenario
    fleet: SimFleet


def simulate_run(
    config: Config,
    *,
    num_prompts: int | None,
    fleet: FleetOptions,
    workload: str = "",
    run_dir: Path | None = None,
    steps: int | None = None,
    offload: OffloadRule = "off",
    all_variants: bool = False,
    json_line: bool = False,
    change: str | None = None,
) -> None:
    """Print what a run of this config would do. Raise SimError, one line, for what is not possible.

    `run_dir`: a run that is the workload. `change`: the config is that of this run except for what
    is named here ("" = nothing); its nodes are those of the run unless `fleet` describes others.
    """
    rerun = Rerun(read_run(run_dir)) if run_dir is not None else None
    if rerun is None:
        scenario = _scenario(config, workload, num_prompts)
        nodes = SimFleet(*_fleet(fleet, config, scenario))
    else:
        scenario = rerun.scenario
        nodes = _fleet_of_run(rerun, config, fleet, is_own=change is not None)
    job = _job(config, scenario, nodes, steps, rerun.num_steps if rerun is not None else STEPS)
    _require_possible(job.settings, job.scenario, offload)
    prediction = None
    if all_variants:
        named = compare(job.settings, job.scenario, nodes, offload)
    else:
        base = simulate(synchronous(job.settings), job.scenario, nodes)
        variant = configured(job.settings, offload)
        outcome = outcome_of(variant, job.scenario, nodes)
        named = {"as configured": figures_of(outcome, variant, job.scenario, base)}
        if rerun is not None and change is not None:
            own = rerun.outcome(job.settings.num_steps) if change else outcome
            prediction = rerun.predict(own, outcome if change else None)
    if json_line:
        predicted = {} if prediction is None else {"prediction": asdict(prediction)}
        print(to_json(as_json(named) | predicted).decode())
        return
    _head(job, config, fleet, rerun.notes(config) if rerun is not None else ())
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    if prediction is not None:
        console.print(prediction.table(change or ""))
        print()
    for part in comparison(named) if all_variants else tables(named["as configured"]):
        console.print(part)


def _scenario(config: Config, workload: str, num_prompts: int | None) -> Scenario:
    scenario = find_scenario(workload, config.rollout.max_response_length, config.run.seed)
    if num_prompts and isinstance(scenario.workload.lengths, LengthModel):
        scenario = replace(scenario, workload=replace(scenario.workload, num_prompts=num_prompts))
    return scenario


def _fleet_of_run(rerun: Rerun, config: Config, options: FleetOptions, *, is_own: bool) -> SimFleet:
    """Return the nodes of the run if the config is its own and no others are asked for."""
    own = rerun.run.config.rollout.nodes
    if is_own and config.rollout.nodes == own and options.adds_only:
        fleet = rerun.fleet(config.rollout.slots)
        return replace(fleet, trace=always_there(options.preemptible))
    nodes, trace = _fleet(options, config, rerun.scenario)
    return SimFleet(rerun.alike(nodes), trace)


def _job(
    config: Config, scenario: Scenario, fleet: SimFleet, steps: int | None, max_steps: int
) -> _Job:
    settings = settings_of(config, scenario.workload.num_prompts)
    if (known := settings.prices) is not None:  # else those of the workload count
        trainer = known.reserved * config.train.nodes
        prices = SimPrices(node=known.reserved, trainer=trainer, spot=known.preemptible)
        scenario = replace(scenario, prices=prices)
    num_steps = steps if steps is not None else min(max_steps, config.train.steps)
    return _Job(replace(settings, num_steps=num_steps), scenario, fleet)


def _require_possible(settings: Settings, scenario: Scenario, offload: OffloadRule) -> None:
    if scenario.is_colocated and settings.max_staleness:
        raise SimError(
            "async.max_staleness: a trainer on the rollout nodes cannot work beside them"
        )
    if not scenario.is_colocated and offload != "off":
        raise SimError(f"--offload {offload}: the trainer of this workload has its own devices")


def _head(job: _Job, config: Config, options: FleetOptions, notes: Sequence[str]) -> None:
    settings, workload, fleet = job.settings, job.scenario.workload, job.fleet
    responses = settings.prompts_per_step * settings.group_size
    if fleet.changes is not None:
        names = {c.spec.name for many in fleet.changes.values() for c in many}
        nodes = f"the {_num_nodes(len(names))} of the run"
    else:
        nodes = f"{_num_nodes(len(fleet.nodes))} x {config.rollout.slots} slots"
    print(
        f"{settings.num_steps} steps of {settings.prompts_per_step} prompts x "
        f"{settings.group_size} = {responses:,} responses of at most "
        f"{settings.max_response_tokens:,} tokens, on {nodes}{_preemptible(options, fleet.trace)}"
    )
    show([f"workload   {workload.name}; {job.scenario.training.placement} trainer"])
    for note in filter(None, (workload.note, *notes)):
        show([f"note       {note}"])
    if job.scenario.is_colocated:
        show([COLOCATED])
    print()


def _num_nodes(num: int) -> str:
    return f"{num} node{'' if num == 1 else 's'}"


def _fleet(
    options: FleetOptions, config: Config, scenario: Scenario
) -> tuple[list[NodeSpec], tuple[TraceEvent, ...]]:
    """Return the nodes that stay, and the trace of others."""
    spot = always_there(options.preemptible) + _events(options, config.run.seed)
    nodes = options.nodes
    if nodes is None:
        is_trace_alone = options.trace and not scenario.is_colocated
        nodes = 0 if is_trace_alone else config.rollout.nodes
    if not nodes and not spot:
        raise SimError("a simulation needs nodes: --nodes N, --trace FILE or rollout.nodes")
    if not nodes and scenario.is_colocated:
        raise SimError(
            "the trainer of this workload is colocated: it needs nodes that are always there, "
            "--nodes N or rollout.nodes"
        )
    names = [f"node-{k}" for k in range(nodes)]
    taken = {TRAINER, *names, *(e.node for e in always_there(options.preemptible))}
    for event in spot[options.preemptible :]:
        if event.node in taken:
            raise SimError(f"{options.trace}: {event.node}: another node has this name")
    return [NodeSpec(name, config.rollout.slots) for name in names], spot


def _events(options: FleetOptions, seed: int) -> tuple[TraceEvent, ...]:
    """Return the selected part of the trace."""
    if options.trace is None:
        parts = {"share": options.share, "from": options.from_s, "to": options.to_s}
        for name, value in parts.items():
            if value is not None:
                raise SimError(f"--trace-{name} takes a part of a trace: --trace FILE is missing")
        return ()
    events = read_trace(options.trace)
    if options.from_s is not None or options.to_s is not None:
        events = cut(events, options.from_s, options.to_s)
    return sample(events, options.share, seed) if options.share is not None else events


def _preemptible(options: FleetOptions, events: Sequence[TraceEvent]) -> str:
    """Example: `, 2 preemptible ones and 177 of p3-trace.csv that join and leave`."""
    parts = [f"{options.preemptible} preemptible ones"] if options.preemptible else []
    if options.trace is not None:
        num = len({e.node for e in events}) - options.preemptible
        parts.append(f"{num} of {options.trace} that join and leave")
    return f", {' and '.join(parts)}" if parts else ""
