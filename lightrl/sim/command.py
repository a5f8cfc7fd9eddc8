"""`lightrl simulate`: a config and a few options in, tables or one line of JSON out."""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from lightrl.config.schema import Config
from lightrl.core.settings import Settings
from lightrl.core_settings import settings_of
from lightrl.errors import SimError
from lightrl.sim.inputs.files import find_scenario
from lightrl.sim.inputs.hardware import SimPrices
from lightrl.sim.inputs.nodes import NodeSpec
from lightrl.sim.inputs.recorded import RecordedRun, read_run
from lightrl.sim.inputs.scenario import OffloadRule, Scenario
from lightrl.sim.inputs.traces import TraceEvent, always_there, cut, read_trace, sample
from lightrl.sim.inputs.workload import LengthModel
from lightrl.sim.prediction import predict, simulate_again
from lightrl.sim.report import comparison, figures, tables
from lightrl.sim.trainer import TRAINER
from lightrl.sim.variants import SimFleet, compare, configured, simulate, synchronous
from lightrl.system.output import show
from lightrl.wire import to_json

WIDTH = 110
SECONDS = re.compile(r"\d*\.?\d+(,[0-4](\.\d+)?)?")
STEPS = 20  # enough for four periods of tail batching
COLOCATED = "note       nodes that are always there sample, then train; with --offload within steps"


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """The environments, as options of the command line; None = those of the workload."""

    # MEAN or MEAN,SIGMA
    environment_s: str | None = None
    turns: int | None = None
    observation_tokens: int | None = None

    def applied_to(self, scenario: Scenario, config: Config) -> Scenario:
        """Raise SimError."""
        given = {k: v for k, v in asdict(self).items() if v is not None}
        if given and not config.environment.enabled:
            name = next(iter(given)).replace("_", "-")
            raise SimError(f"--{name}: the config has no environment; set environment.source")
        if (text := given.pop("environment_s", None)) is not None:
            if not SECONDS.fullmatch(text):
                raise SimError(f"--environment-s {text}: is not MEAN or MEAN,SIGMA, of seconds")
            given["mean_s"], given["sigma"] = (*map(float, text.split(",")), 1.0)[:2]
        environment, slots = scenario.workload.environment, config.environment.slots
        environment = replace(environment, slots=slots, **given)
        return replace(scenario, workload=replace(scenario.workload, environment=environment))


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


def simulate_run(
    config: Config,
    *,
    num_prompts: int | None,
    fleet: FleetOptions,
    episodes: EpisodeOptions = EpisodeOptions(),
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
    run = read_run(run_dir) if run_dir is not None else None
    scenario = _with_prices(
        run.scenario if run is not None else _scenario(config, workload, num_prompts), config
    )
    scenario = episodes.applied_to(scenario, config)
    nodes = _fleet(fleet, config, scenario, run, is_own=change is not None)
    max_steps = min(run.num_steps if run is not None else STEPS, config.train.steps)
    settings = settings_of(config, scenario.workload.num_prompts)
    settings = replace(settings, num_steps=max_steps if steps is None else steps)
    _require_possible(settings, scenario, offload)
    prediction = None
    if all_variants:
        named = compare(settings, scenario, nodes, offload)
    else:
        base = simulate(synchronous(settings), scenario, nodes)
        outcome = simulate(configured(settings, offload), scenario, nodes)
        named = {"as configured": figures(outcome, scenario, base.step_s)}
        if run is not None and change is not None:
            own = simulate_again(run, settings.num_steps) if change else outcome
            prediction = predict(run, own, outcome if change else None)
    if json_line:
        predicted = {} if prediction is None else {"prediction": asdict(prediction)}
        print(to_json({name: asdict(f) for name, f in named.items()} | predicted).decode())
        return
    _head(settings, scenario, nodes, fleet, config, run)
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    if prediction is not None:
        console.print(prediction.table(change or ""))
        print()
    for part in [comparison(named)] if all_variants else tables(named["as configured"]):
        console.print(part)


def _scenario(config: Config, workload: str, num_prompts: int | None) -> Scenario:
    scenario = find_scenario(workload, config.rollout.max_response_length, config.run.seed)
    if num_prompts and isinstance(scenario.workload.lengths, LengthModel):
        scenario = replace(scenario, workload=replace(scenario.workload, num_prompts=num_prompts))
    return scenario


def _with_prices(scenario: Scenario, config: Config) -> Scenario:
    """Return the scenario with the prices of the config, if it has some."""
    known = settings_of(config, scenario.workload.num_prompts).prices
    if known is None:
        return scenario
    trainer = known.reserved * config.train.nodes
    prices = SimPrices(node=known.reserved, trainer=trainer, spot=known.preemptible)
    return replace(scenario, prices=prices)


def _require_possible(settings: Settings, scenario: Scenario, offload: OffloadRule) -> None:
    if scenario.is_colocated and settings.max_staleness:
        raise SimError(
            "async.max_staleness: a trainer on the rollout nodes cannot work beside them"
        )
    if not scenario.is_colocated and offload != "off":
        raise SimError(f"--offload {offload}: the trainer of this workload has its own devices")


def _head(
    settings: Settings,
    scenario: Scenario,
    fleet: SimFleet,
    options: FleetOptions,
    config: Config,
    run: RecordedRun | None,
) -> None:
    """Print what is simulated: the steps, the nodes, the workload, and notes."""
    responses = settings.prompts_per_step * settings.group_size
    nodes = f"{len(fleet.nodes)} node{'s' * (len(fleet.nodes) != 1)}"
    if fleet.changes is not None:
        nodes = f"the {nodes} of the run"
    else:
        nodes += f" x {config.rollout.slots} slots"
    others = [f"{options.preemptible} preemptible ones"] if options.preemptible else []
    if options.trace is not None:
        num = len({e.node for e in fleet.trace}) - options.preemptible
        others.append(f"{num} of {options.trace} that join and leave")
    print(
        f"{settings.num_steps} steps of {settings.prompts_per_step} prompts x "
        f"{settings.group_size} = {responses:,} responses of at most "
        f"{settings.max_response_tokens:,} tokens, on {nodes}"
        + (f", {' and '.join(others)}" if others else "")
    )
    show([f"workload   {scenario.workload.name}; {scenario.training.placement} trainer"])
    notes = run.notes(config) if run is not None else []
    for note in filter(None, (scenario.workload.note, *notes)):
        show([f"note       {note}"])
    if settings.episodes is not None:
        e = scenario.workload.environment
        each = f"observations of {e.observation_tokens:,} tokens after {e.mean_s:g} s"
        show([f"episodes   {e.turns} turns on average, {each} (lognormal, sigma {e.sigma:g})"])
    if scenario.is_colocated:
        show([COLOCATED])
    print()


def _fleet(
    options: FleetOptions,
    config: Config,
    scenario: Scenario,
    run: RecordedRun | None,
    *,
    is_own: bool,
) -> SimFleet:
    """Return the nodes that stay, and others; those of the run if the config is its own and no
    others are asked for."""
    stay = always_there(options.preemptible)
    is_own &= options == FleetOptions(preemptible=options.preemptible)
    if run is not None and is_own and config.rollout.nodes == run.config.rollout.nodes:
        return SimFleet(run.own_nodes(config.rollout.slots), stay, run.changes)
    come_and_go = _events(options, config.run.seed)
    num = options.nodes
    if num is None:
        num = 0 if options.trace and not scenario.is_colocated else config.rollout.nodes
    if not num and not (stay or come_and_go):
        raise SimError("a simulation needs nodes: --nodes N, --trace FILE or rollout.nodes")
    if not num and scenario.is_colocated:
        raise SimError(
            "the trainer of this workload is colocated: it needs nodes that are always there, "
            "--nodes N or rollout.nodes"
        )
    nodes = [NodeSpec(f"node-{k}", config.rollout.slots) for k in range(num)]
    taken = {TRAINER, *(node.name for node in nodes), *(event.node for event in stay)}
    for event in come_and_go:
        if event.node in taken:
            raise SimError(f"{options.trace}: {event.node}: another node has this name")
    return SimFleet(run.alike(nodes) if run is not None else nodes, stay + come_and_go)


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
