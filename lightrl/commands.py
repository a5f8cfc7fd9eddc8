"""The commands that begin no run: they look at one, ask something of it, evaluate what it has left,
check a machine, predict.

As in cli.py, which makes them commands: parses, calls, prints; everything heavier than typer is
imported inside them.
"""

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from lightrl import arguments
from lightrl.arguments import AsJson, KeyFile, Settings, Target
from lightrl.errors import ConfigError, LightRLError
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
    """Tell what the journal of a run holds: rounds, tokens, scores, versions, damage."""
    from lightrl.client.address import find_folder
    from lightrl.replay.report import replay_json, replay_lines

    run_dir = find_folder(run, "a journal is read from a run directory")
    if as_json:
        show([replay_json(run_dir, step, response)])
    else:
        show(replay_lines(run_dir, step, response))


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="RUN/checkpoints/step_N; or RUN, for its newest one"
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a directory that is not there yet")],
    shard_mb: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="megabytes of a file of safetensors; default: 2000"),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="of LoRA adapters with their model, by its files; else they are alone"
        ),
    ] = False,
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


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="RUN/checkpoints/step_N, a run's name or directory (its newest), a Hugging Face "
            "model directory or hub id, or LoRA adapters",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [section.key=value ...]",
            help="a TOML file; default: that of CHECKPOINT's run; values that override it",
        ),
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
    files, overrides = arguments.split_args(settings or [])
    if len(files) > 1:
        raise ConfigError(f"one CONFIG is possible, not {len(files)}: {' '.join(files)}")
    from lightrl.launch.evaluate import EvalOptions, evaluate

    config = Path(files[0]) if files else None
    options = EvalOptions(config, tuple(overrides), tuple(sets or ()), samples, as_json)
    exit_with(wait_for(evaluate(checkpoint, options)))


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
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [section.key=value ...]", help="a TOML file; values that override it"
        ),
    ],
    num: Annotated[
        int, typer.Option("--num", "-n", min=0, metavar="N", help="prompts of each set to show")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Read the data of a CONFIG: its sets, how long their prompts are, and some as the model sees
    them."""
    from lightrl.launch.data_report import data_json, data_lines

    config = arguments.config(settings)
    if config is None:
        raise typer.BadParameter("give a CONFIG")
    show(data_json(config, num) if as_json else data_lines(config, num))


def check(settings: Settings = None) -> None:
    """Verify this machine, and a CONFIG if one is given, and report what to do."""
    from lightrl.launch.checks import Setup, judge

    setup = Setup(arguments.config(settings or []))
    failed = False
    for finding in judge(setup, "check"):
        failed |= finding.verdict == "fail"
        show([f"{finding.verdict:5} {finding.subject:14} {finding.text}"])
    exit_with(int(failed))


AlwaysThere = Annotated[
    int | None,
    typer.Option(min=0, help="rollout nodes that are always there; default: rollout.nodes"),
]
PreemptibleNodes = Annotated[
    int, typer.Option(min=0, help="preemptible nodes that stay, beside them")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="CSV of more nodes that join and leave: milliseconds,add|remove,node"
    ),
]
TraceShare = Annotated[
    float | None, typer.Option(metavar="S", help="of its nodes, drawn by run.seed; 0 < S <= 1")
]
TraceFrom = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="nodes that are there by then are there from the start"),
]
TraceTo = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="nodes that are there by then stay")
]
Workload = Annotated[
    str,
    typer.Option(metavar="FILE|RUN|PRESET", help="lengths and speeds; default: a generic guess"),
]
NumSteps = Annotated[
    int | None,
    typer.Option(min=1, help="default: train.steps, at most 20; those of a run, at most 200"),
]
Compare = Annotated[bool, typer.Option("--compare", help="each mechanism alone, in one table")]
Figures = Annotated[bool, typer.Option("--json", help="all figures, as one line of JSON")]
Offload = Annotated[
    Literal["off", "foreseen", "window"],
    typer.Option(help="by which rule GPUs that also train leave the rollout (simulated only)"),
]


def simulate(
    settings: Settings = None,
    nodes: AlwaysThere = None,
    preemptible: PreemptibleNodes = 0,
    trace: Trace = None,
    trace_share: TraceShare = None,
    trace_from: TraceFrom = None,
    trace_to: TraceTo = None,
    workload: Workload = "",
    steps: NumSteps = None,
    offload: Offload = "off",
    compare: Compare = False,
    as_json: Figures = False,
) -> None:
    """Predict how fast CONFIG would run on a fleet, with the real scheduler.

    With --workload RUN lengths and speeds are those of that run. Without CONFIG its own setting is
    simulated, beside what it measured; overrides and --nodes change it.
    """
    from lightrl.client.address import run_folder
    from lightrl.launch.plan import count_prompts
    from lightrl.sim.command import FleetOptions, simulate_run
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
    """The config, and what is otherwise than in the run of which it is, if it is of one. Raises
    ConfigError."""
    from lightrl.config.run_file import load_config
    from lightrl.launch.folder import CONFIG_FILE

    files, overrides = arguments.split_args(settings)
    if run_dir is not None and not files:
        if not (run_dir / CONFIG_FILE).is_file():
            raise ConfigError(f"--workload {run_dir}: is no run directory: it has no config.toml")
        change = " ".join(filter(None, (*overrides, fleet)))
        return load_config(run_dir / CONFIG_FILE, overrides), change
    if (config := arguments.config(settings)) is None:
        raise typer.BadParameter(
            "give a CONFIG, or a run as --workload RUN; overrides such as rollout.slots=64 "
            "describe the nodes"
        )
    return config, None


def reference(
    metrics: Annotated[
        bool, typer.Option("--metrics", help="the figures of metrics.jsonl, not the keys")
    ] = False,
) -> None:
    """Print every config key with its default, its allowed values and its meaning."""
    if metrics:
        from lightrl.metrics.names import table

        print("\n".join(table()))
        return
    from lightrl.config.reference import allowed
    from lightrl.config.schema import keys

    section = ""
    for key, default, description in keys():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            print(f"\n[{section}]")
        value = "unset" if default == "null" else default
        print(f"{key:32} {value:22} {allowed(key):26} {description}".rstrip())


def wait_for(work: "Coroutine[object, object, T]") -> T:
    import asyncio

    return asyncio.run(work)


def exit_with(status: int) -> None:
    if status:
        raise typer.Exit(status)
