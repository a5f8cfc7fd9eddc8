"""The commands that start no run: they report on one, evaluate or export its checkpoints, check a
machine, predict.

As in cli.py, which registers them: everything heavier than typer is imported inside them.
"""

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from lightrl.errors import ConfigError, LightRLError
from lightrl.options import (
    SETTINGS,
    AsJson,
    KeyFile,
    Settings,
    Target,
    read_config,
    required_config,
    split_args,
)
from lightrl.system.output import show

if TYPE_CHECKING:
    from lightrl.config.schema import Config

T = TypeVar("T")


def replay(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="default: runs/latest")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="the responses of this step")] = None,
    response: Annotated[str, typer.Option(metavar="ID", help="the tokens of this response")] = "",
    as_json: AsJson = False,
) -> None:
    """Print the contents of a run's journal: rounds, tokens, scores, versions, damage."""
    from lightrl.client.address import find_folder
    from lightrl.replay.report import replay_json, replay_lines

    run_dir = find_folder(run, "a journal is read from a run directory")
    if as_json:
        show([replay_json(run_dir, step, response)])
    else:
        show(replay_lines(run_dir, step, response))


CHECKPOINT = "RUN/checkpoints/step_N; or RUN, for its newest one"
MERGE = "LoRA adapters with their model, by its files; else the adapters alone"


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a directory that is not there yet")],
    shard_mb: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="megabytes of a file of safetensors; default: 2000"),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help=MERGE)] = False,
) -> None:
    """Make a Hugging Face model directory of a checkpoint: safetensors, config, tokenizer.

    Needs neither a GPU nor the run, and as much memory as one file has.
    """
    if merge and shard_mb is not None:
        raise ConfigError(
            f"--shard-mb {shard_mb}: with --merge the files are those of the model; leave it out"
        )
    from lightrl.launch.export import export_checkpoint, find_checkpoint

    export_checkpoint(find_checkpoint(checkpoint), out, shard_mb, is_merged=merge)
    show([str(out)])


EVALUATED = (
    "RUN/checkpoints/step_N, a run's name or directory (its newest), a Hugging Face model "
    "directory or hub id, or LoRA adapters"
)


def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=EVALUATED)],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar=SETTINGS, help="a TOML file; default: that of CHECKPOINT's run"),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME", help="this set alone; several: --set A --set B"),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write all responses there, as lines of JSON"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="the result as one line of JSON; progress to stderr")
    ] = False,
) -> None:
    """Evaluate CHECKPOINT on the sets of CONFIG with this machine's engines; nothing is trained."""
    file, overrides = split_args(settings or [], "CONFIG")
    from lightrl.launch.evaluation.run import EvalOptions, evaluate

    config = Path(file) if file else None
    options = EvalOptions(config, tuple(overrides), tuple(sets or ()), samples, as_json)
    exit_with(wait_for(evaluate(checkpoint, options)))


HOST = "others than this machine reach it only with a --key"
ENGINES = "processes with the model; default: one for each GPU, else one"
MAX_LENGTH = "tokens of prompt and answer; default: as in the run"


def serve(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=EVALUATED)],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value ...]", help="values of the run's config"),
    ] = None,
    host: Annotated[str, typer.Option(help=HOST)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    key: Annotated[str, typer.Option(help="API key that clients must send; default: any")] = "",
    engine: Annotated[str, typer.Option(help="vllm or torch; default: as in the run")] = "",
    engines: Annotated[int, typer.Option(min=0, show_default=False, help=ENGINES)] = 0,
    slots: Annotated[
        int, typer.Option(min=0, show_default=False, help="concurrent answers of each engine")
    ] = 0,
    max_length: Annotated[int, typer.Option(min=0, show_default=False, help=MAX_LENGTH)] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="load each newer checkpoint of the run")
    ] = False,
) -> None:
    """Answer OpenAI-style requests with CHECKPOINT from this machine's engines, until ctrl-C."""
    file, overrides = split_args(settings or [], "CONFIG")
    if file:
        raise ConfigError(f"{file}: only section.key=value can follow CHECKPOINT")
    from lightrl.launch.serving.serve import ServeOptions, serve

    overrides += [f'rollout.engine="{engine}"'] if engine else []
    overrides += [f"rollout.slots={slots}"] if slots else []
    given = tuple(overrides)
    options = ServeOptions(host, port, key, given, engines, max_length, follow)
    wait_for(serve(checkpoint, options))


def status(addr: Target = None, key: KeyFile = None, as_json: AsJson = False) -> None:
    """Show the nodes, the round and the step of a run."""
    from lightrl.client.find_run import one_snapshot, resolve_target
    from lightrl.launch.report import status_lines
    from lightrl.wire import to_json

    snapshot = wait_for(one_snapshot(resolve_target(addr, key)))
    show([to_json(snapshot).decode()] if as_json else status_lines(snapshot))


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help="names or directories")],
    as_json: AsJson = False,
) -> None:
    """Show how the settings of runs differ, and the results of each, side by side."""
    from rich.console import Console

    from lightrl.client.address import find_folder
    from lightrl.launch import compare as comparing

    folders = [find_folder(run, "compare needs a run's name or directory") for run in runs]
    results = [comparing.result_of(folder) for folder in folders]
    results = comparing.with_distinct_names(results, folders)
    if as_json:
        show([comparing.as_json(results)])
    else:
        Console().print(comparing.as_table(results))


def top(addr: Target = None, key: KeyFile = None) -> None:
    """Watch a running or finished run on a live screen (q leaves, ? shows the keys)."""
    from lightrl.client.find_run import OVER, one_snapshot, resolve_target
    from lightrl.tui.app import show_finished, watch_live

    if not sys.stdout.isatty():
        raise LightRLError("lightrl top needs a terminal; lightrl status prints plain lines")
    target = resolve_target(addr, key)
    now = wait_for(one_snapshot(target))
    if target.address is None or now.state in OVER:
        wait_for(show_finished(now))
    else:
        wait_for(watch_live(target.address, target.key(), True, target.run_dir, first=now))


def down(addr: Target = None, key: KeyFile = None) -> None:
    """Stop a run: no new work, a checkpoint of the steps done, all daemons leave."""
    from lightrl.client import ask
    from lightrl.client.find_run import live_run, resolve_target

    target = resolve_target(addr, key)
    address, _ = wait_for(live_run(target))
    wait_for(ask.drain(address, "*", "lightrl down", target.key()))
    print("the run is stopping; lightrl status shows when it is over")


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="as lightrl status names it")],
    addr: Target = None,
    key: KeyFile = None,
) -> None:
    """Let one rollout node go: its responses continue on others."""
    from lightrl.client import ask
    from lightrl.client.find_run import live_run, require_drainable, resolve_target

    target = resolve_target(addr, key)
    address, snapshot = wait_for(live_run(target))
    require_drainable(snapshot, node)
    wait_for(ask.drain(address, node, "lightrl drain", target.key()))
    show([f"{node} is leaving"])


def data(
    settings: Settings = None,
    num: Annotated[
        int, typer.Option("--num", "-n", min=0, metavar="N", help="prompts of each set to show")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Read the data of a CONFIG: its sets, how long their prompts are, and some as the model sees
    them."""
    from lightrl.launch.data_report import data_json, data_lines

    config = required_config(settings or [])
    show(data_json(config, num) if as_json else data_lines(config, num))


def check(settings: Settings = None) -> None:
    """Verify this machine, and a CONFIG if one is given, and report what to do."""
    from lightrl.launch.checks.checklist import Launch, judge

    failed = False
    for finding in judge(Launch(read_config(settings or [])), "check"):
        failed |= finding.verdict == "fail"
        show([f"{finding.verdict:5} {finding.subject:14} {finding.text}"])
    exit_with(int(failed))


RESERVED = "rollout nodes that are always there; default: rollout.nodes"
TRACE = "CSV of more nodes that join and leave: milliseconds,add|remove,node"
FROM = "nodes that are there by then are there from the start"
WORKLOAD = "lengths and speeds; default: a generic guess"
STEPS = "default: train.steps, at most 20; those of a run, at most 200"
ENVIRONMENT_S = "of a reset or step of an environment; lognormal; default: 1,1"
EnvironmentSeconds = Annotated[str | None, typer.Option(metavar="MEAN[,SIGMA]", help=ENVIRONMENT_S)]
Turns = Annotated[int | None, typer.Option(min=1, help="of an episode, on average; default: 4")]
TOKENS = "of an observation; default: 100"
ObservationTokens = Annotated[int | None, typer.Option(min=1, help=TOKENS)]
OFFLOAD = "the rule by which GPUs that also train leave the rollout (simulated only)"


def simulate(
    settings: Settings = None,
    nodes: Annotated[int | None, typer.Option(min=0, help=RESERVED)] = None,
    preemptible: Annotated[
        int, typer.Option(min=0, help="preemptible nodes that stay, beside them")
    ] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help=TRACE)] = None,
    trace_share: Annotated[
        float | None,
        typer.Option(metavar="S", help="of its nodes, drawn by run.seed; 0 < S <= 1"),
    ] = None,
    trace_from: Annotated[float | None, typer.Option(metavar="SECONDS", help=FROM)] = None,
    trace_to: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="nodes that are there by then stay")
    ] = None,
    workload: Annotated[str, typer.Option(metavar="FILE|RUN|PRESET", help=WORKLOAD)] = "",
    steps: Annotated[int | None, typer.Option(min=1, help=STEPS)] = None,
    offload: Annotated[Literal["off", "foreseen", "window"], typer.Option(help=OFFLOAD)] = "off",
    environment_s: EnvironmentSeconds = None,
    turns: Turns = None,
    observation_tokens: ObservationTokens = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="each mechanism alone, in one table")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="all figures, as one line of JSON")
    ] = False,
) -> None:
    """Predict how fast CONFIG would run on a fleet, with the real scheduler.

    With --workload RUN lengths and speeds are those of that run. Without CONFIG its own setting is
    simulated, beside what it measured; overrides and --nodes change it.
    """
    from lightrl.client.address import run_folder
    from lightrl.launch.checks.plan import count_prompts
    from lightrl.sim.command import EpisodeOptions, FleetOptions, simulate_run
    from lightrl.sim.inputs.files import require_known

    fleet = FleetOptions(nodes, preemptible, trace, trace_share, trace_from, trace_to)
    run_dir = run_folder(workload) if workload else None
    if run_dir is None:
        require_known(workload)
    config, change = _to_simulate(settings or [], run_dir, fleet.text)
    simulate_run(
        config,
        num_prompts=count_prompts(config.data.all_sets) if run_dir is None else None,
        fleet=fleet,
        episodes=EpisodeOptions(environment_s, turns, observation_tokens),
        workload=workload,
        run_dir=run_dir,
        steps=steps,
        offload=offload,
        all_variants=compare,
        json_line=as_json,
        change=change,
    )


def _to_simulate(
    settings: list[str], run_dir: Path | None, fleet: str
) -> "tuple[Config, str | None]":
    """Return the config, and its changes to that of the run, if it is a run's. Raises
    ConfigError."""
    from lightrl.config.run_file import CONFIG_FILE, load_config

    file, overrides = split_args(settings, "CONFIG")
    if run_dir is None or file:
        more = ", or a run as --workload RUN; overrides such as rollout.slots=64 describe the nodes"
        return required_config(settings, more=more), None
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"--workload {run_dir}: is no run directory: it has no {CONFIG_FILE}")
    change = " ".join(filter(None, (*overrides, fleet)))
    return load_config(run_dir / CONFIG_FILE, overrides), change


def reference(
    metrics: Annotated[
        bool, typer.Option("--metrics", help="the figures of metrics.jsonl, not the keys")
    ] = False,
) -> None:
    """Print every config key with its default, its allowed values and its meaning."""
    if metrics:
        from lightrl.metrics.names import table
    else:
        from lightrl.config.reference import table
    print("\n".join(table()))


def wait_for(work: "Coroutine[object, object, T]") -> T:
    import asyncio

    return asyncio.run(work)


def exit_with(status: int) -> None:
    if status:
        raise typer.Exit(status)
