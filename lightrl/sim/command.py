"""`lightrl simulate`: a config and a few options in, tables or one line of JSON out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from lightrl.config.schema import Config
from lightrl.core.settings import Settings
from lightrl.core_settings import settings_of
from lightrl.errors import SimError
from lightrl.sim.baselines import (
    Fleet,
    compare,
    configured,
    figures_of,
    outcome_of,
    simulate,
    synchronous,
)
from lightrl.sim.costs import Prices
from lightrl.sim.machines import NodeSpec
from lightrl.sim.messages import TRAINER
from lightrl.sim.prediction import comparison_table, predict
from lightrl.sim.report import as_json, comparison, tables
from lightrl.sim.rerun import Rerun, open_run
from lightrl.sim.scenario import OffloadRule, Scenario, find_scenario
from lightrl.sim.traces import TraceEvent, always_there, cut, read_trace, sample
from lightrl.sim.workload import LengthModel
from lightrl.system.output import show
from lightrl.wire import to_json

WIDTH = 110
STEPS = 20  # enough for four periods of tail batching
COLOCATED = "note       nodes that are always there sample, then train; with --offload within steps"


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Which nodes are there, as the command line says it."""

    # rollout nodes that are always there; None = by trace and config
    nodes: int | None = None
    # nodes that could go, and do not
    preemptible: int = 0
    trace: Path | None = None
    # of the trace's nodes
    share: float | None = None
    # seconds of the trace
    from_s: float | None = None
    to_s: float | None = None

    @property
    def adds_only(self) -> bool:
        """Nothing is said of the nodes that are there anyway."""
        return self == FleetOptions(preemptible=self.preemptible)

    @property
    def text(self) -> str:
        """As on the command line. Example: "--nodes 8"."""
        said = {
            "nodes": self.nodes,
            "preemptible": self.preemptible or None,
            "trace": self.trace,
            "trace-share": self.share,
            "trace-from": self.from_s,
            "trace-to": self.to_s,
        }
        return " ".join(f"--{name} {value}" for name, value in said.items() if value is not None)


@dataclass(frozen=True)
class _Question:
    """What is to be simulated."""

    settings: Settings
    scenario: Scenario
    fleet: Fleet


def simulate_run(
    config: Config,
    *,
    num_prompts: int | None,
    fleet: FleetOptions,
    workload: str = "",
    steps: int | None = None,
    offload: OffloadRule = "off",
    all_variants: bool = False,
    json_line: bool = False,
    change: str | None = None,
) -> None:
    """Prints what a run of this config would do. Raises SimError, one line, for what cannot be.

    `change`: the config is that of the run which `workload` is the directory of, but for what is
    named here, "" for nothing; its nodes are those of the run unless `fleet` says otherwise.
    """
    rerun = open_run(workload)
    question = _question(config, rerun, num_prompts, fleet, workload, steps, change is not None)
    settings, scenario = question.settings, question.scenario
    _require_possible(settings, scenario, offload)
    speculates = config.speculates and scenario.has_speculated
    prediction = None
    if all_variants:
        named = compare(settings, scenario, question.fleet, speculates, offload)
    else:
        base = simulate(synchronous(settings), scenario, question.fleet)
        variant = configured(settings, speculates, offload)
        outcome = outcome_of(variant, scenario, question.fleet)
        named = {"as configured": figures_of(outcome, variant, scenario, base)}
        if rerun is not None and change is not None:
            own = rerun.outcome(settings.num_steps) if change else outcome
            prediction = predict(rerun.run, scenario, own, outcome if change else None)
    if json_line:
        said = {} if prediction is None else {"prediction": asdict(prediction)}
        print(to_json(as_json(named) | said).decode())
        return
    _head(question, config, fleet, rerun.notes(config) if rerun is not None else ())
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    if prediction is not None:
        console.print(comparison_table(prediction, change or ""))
        print()
    for part in comparison(named) if all_variants else tables(named["as configured"]):
        console.print(part)


def _question(
    config: Config,
    rerun: Rerun | None,
    num_prompts: int | None,
    options: FleetOptions,
    workload: str,
    steps: int | None,
    is_own: bool,
) -> _Question:
    """`is_own`: the config is that of the run."""
    limit, most = config.rollout.max_response_length, STEPS
    if rerun is None:
        scenario = find_scenario(workload, limit, config.run.seed)
        if num_prompts and isinstance(scenario.workload.lengths, LengthModel):
            known = replace(scenario.workload, num_prompts=num_prompts)
            scenario = replace(scenario, workload=known)
        fleet = Fleet(*_fleet(options, config, scenario))
    elif is_own and rerun.has_nodes_of(config) and options.adds_only:
        scenario, most = rerun.scenario, rerun.num_steps
        fleet = replace(rerun.fleet(config.rollout.slots), trace=always_there(options.preemptible))
    else:
        scenario, most = rerun.scenario, rerun.num_steps
        nodes, trace = _fleet(options, config, scenario)
        fleet = Fleet(rerun.alike(nodes), trace)
    settings = settings_of(config, scenario.workload.num_prompts)
    if (known := settings.prices) is not None:  # else those of the workload count
        trainer = known.reserved * config.train.nodes
        prices = Prices(node=known.reserved, trainer=trainer, spot=known.preemptible)
        scenario = replace(scenario, prices=prices)
    num_steps = steps if steps is not None else min(most, config.train.steps)
    return _Question(replace(settings, num_steps=num_steps), scenario, fleet)


def _require_possible(settings: Settings, scenario: Scenario, offload: OffloadRule) -> None:
    if scenario.training.placement == "colocated" and settings.max_staleness:
        raise SimError(
            "async.max_staleness: a trainer on the rollout nodes cannot work beside them"
        )
    if scenario.training.placement == "dedicated" and offload != "off":
        raise SimError(f"--offload {offload}: the trainer of this workload has its own devices")


def _head(question: _Question, config: Config, options: FleetOptions, notes: Sequence[str]) -> None:
    settings, workload = question.settings, question.scenario.workload
    placement, fleet = question.scenario.training.placement, question.fleet
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
    show([f"workload   {workload.name}; {placement} trainer"])
    for note in filter(None, (workload.note, *notes)):
        show([f"note       {note}"])
    if placement == "colocated":
        show([COLOCATED])
    print()


def _num_nodes(num: int) -> str:
    return f"{num} node{'' if num == 1 else 's'}"


def _fleet(
    options: FleetOptions, config: Config, scenario: Scenario
) -> tuple[list[NodeSpec], tuple[TraceEvent, ...]]:
    """Nodes that are always there, and when others come and go."""
    spot = always_there(options.preemptible) + _events(options, config.run.seed)
    nodes = options.nodes
    if nodes is None:
        is_trace_alone = options.trace and scenario.training.placement == "dedicated"
        nodes = 0 if is_trace_alone else config.rollout.nodes
    if not nodes and not spot:
        raise SimError("a simulation needs nodes: --nodes N, --trace FILE or rollout.nodes")
    if not nodes and scenario.training.placement == "colocated":
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
    """The part of the trace that is asked for."""
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
    """Example: `, 2 preemptible ones and 177 of p3-trace.csv that come and go`."""
    said = [f"{options.preemptible} preemptible ones"] if options.preemptible else []
    if options.trace is not None:
        num = len({e.node for e in events}) - options.preemptible
        said.append(f"{num} of {options.trace} that come and go")
    return f", {' and '.join(said)}" if said else ""
