"""The command line, the only main. Parses, calls, prints; decides nothing about runs.

`lightrl --help` must stay quick: everything heavier than typer is imported inside the commands.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightrl import __version__, commands, log
from lightrl.commands import exit_with, wait_for
from lightrl.errors import ConfigError, LightRLError
from lightrl.options import (
    FromOption,
    KeyFile,
    NameOption,
    NoTui,
    ParallelOption,
    PartOption,
    Preemptible,
    RoleOption,
    Settings,
    SharesOption,
    Slots,
    WorkersOption,
    default_name,
    default_role,
    parse_roles,
    read_config,
    require_coherent,
    required_config,
    split_args,
)
from lightrl.system.output import escape_unencodable, print_error, show

if TYPE_CHECKING:
    from lightrl.config.schema import Config
    from lightrl.daemon.main import DaemonOptions

RED = "\x1b[31m"

app = typer.Typer(
    help="Reinforcement-learning post-training of language models on reserved and "
    "preemptible nodes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"lightrl {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print it and end")
]
Join = Annotated[
    str, typer.Option(metavar="tcp://HOST:PORT", help="become a node of that running coordinator")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="print the resolved config and what it means; start nothing"),
]


@app.callback()
def lightrl(version: VersionOption = False) -> None:
    pass


@app.command()
def up(
    settings: Settings = None,
    join: Join = "",
    key: KeyFile = None,
    from_: FromOption = "",
    role: RoleOption = "",
    name: NameOption = "",
    slots: Slots = 0,
    preemptible: Preemptible = False,
    shares: SharesOption = "",
    part: PartOption = 0,
    parallel: ParallelOption = 0,
    workers: WorkersOption = 0,
    no_tui: NoTui = False,
    dry_run: DryRun = False,
) -> None:
    """Start a run on this machine, or join one as a node.

    With CONFIG alone: coordinator, trainer and all nodes as separate processes here. With
    --role: one daemon with these roles in the foreground. With --join: a node of a running
    coordinator; ctrl-C leaves. Needs the key of that run: --key FILE.
    """
    from lightrl.daemon.main import DaemonOptions

    options = DaemonOptions(
        name,
        parse_roles(role or (default_role(key) if join else "")),
        join=join,
        slots=slots,
        is_preemptible=preemptible,
        shares=shares,
        part=part,
        parallel=parallel,
        workers=workers,
    )
    require_coherent(settings or [], options)
    if key is not None and not join:
        raise ConfigError("--key is for --join: a run that is started makes its own key")
    config = read_config(settings or [], from_)
    if dry_run:
        if config is None:
            raise typer.BadParameter("--dry-run needs a CONFIG")
        _dry_run(config, options)
    elif "coordinator" in options.roles:
        if config is None:
            raise typer.BadParameter("--role coordinator needs a CONFIG")
        if join:
            raise typer.BadParameter("a coordinator does not --join another one")
        _foreground(config, options)
    elif options.roles:
        _join(key, options)
    elif config is None:
        raise typer.BadParameter(
            "give a CONFIG to start a run, or --join tcp://HOST:PORT to join one"
        )
    else:
        _whole_run(config, no_tui)


@app.command()
def resume(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [section.key=value ...]",
            help="a run directory or name (default: runs/latest), and config values to change",
        ),
    ] = None,
    from_checkpoint: Annotated[
        bool, typer.Option("--from-checkpoint", help="forget what came after the newest checkpoint")
    ] = False,
    role: RoleOption = "",
    name: NameOption = "",
    slots: Slots = 0,
    no_tui: NoTui = False,
) -> None:
    """Continue a run that was stopped, failed or was killed, from where it was.

    On this machine as with `lightrl up`; with --role one daemon with these roles in the foreground.
    """
    from lightrl.daemon.main import DaemonOptions

    options = DaemonOptions(name, parse_roles(role), slots=slots, resume=True)
    require_coherent([], options)
    if options.roles and "coordinator" not in options.roles:
        raise typer.BadParameter(
            "--role needs coordinator to resume a run; others join it: lightrl up --join"
        )
    target, overrides = split_args(run or [], "RUN")
    from lightrl.launch.resume import prepare

    config = prepare(target or None, overrides, from_checkpoint)
    if options.roles:
        _foreground(config, options)
    else:
        _whole_run(config, no_tui, resume=True)


@app.command()
def slurm(
    settings: Settings = None,
    from_: FromOption = "",
    nodes: Annotated[int, typer.Option(min=0, help="rollout nodes")] = 1,
    trainer_nodes: Annotated[
        int, typer.Option(min=0, help="that train together, the first job's too; default: CONFIG")
    ] = 0,
    partition_reserved: Annotated[str, typer.Option(help="of coordinator and trainers")] = "",
    partition_spot: Annotated[
        str, typer.Option(help="of the rollout nodes, which may be preempted")
    ] = "",
    time: Annotated[str, typer.Option(help="limit of the jobs, as sbatch has it")] = "",
    reserved_args: Annotated[str, typer.Option(help="more for sbatch, '--gpus=8 --mem=0'")] = "",
    spot_args: Annotated[str, typer.Option(help="more for sbatch")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the scripts, submit nothing")
    ] = False,
) -> None:
    """Run CONFIG on a Slurm cluster: batch scripts in the run directory, written and submitted."""
    trainers = [f"train.nodes={trainer_nodes}"] if settings and trainer_nodes else []
    config = required_config([*(settings or []), *trainers], from_)
    from lightrl.launch.slurm.scripts import SlurmOptions, submit

    options = SlurmOptions(
        nodes, partition_reserved, partition_spot, time, reserved_args, spot_args
    )
    print("\n".join(submit(config, options, dry_run)))


@app.command("slurm-job", hidden=True)
def slurm_job(
    part: str, what: list[str], slots: Slots = 0, preemptible: Preemptible = False
) -> None:
    """The command of the scripts: head CONFIG [section.key=value ...], node RUN_DIR, node ADDRESS
    KEY_FILE, trainer RUN_DIR."""
    from lightrl.launch.slurm.job import run_part

    exit_with(wait_for(run_part(part, what, slots, preemptible)))


@app.command(hidden=True)
def daemon(
    name: Annotated[str, typer.Option()],
    role: Annotated[str, typer.Option()],
    run_dir: Annotated[Path, typer.Option()],
    join: Annotated[str, typer.Option()] = "",
    tied: Annotated[bool, typer.Option("--tied", help="leave when stdin closes")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="a coordinator: continue from the journal")
    ] = False,
    gpus: Annotated[str, typer.Option(help="for CUDA_VISIBLE_DEVICES of its children")] = "",
    gpu_memory: Annotated[float, typer.Option(help="share of them that its engine may take")] = 0.0,
    shares: SharesOption = "",
    part: PartOption = 0,
    parallel: ParallelOption = 0,
) -> None:
    """One daemon of a run on this machine, started by `lightrl up`."""
    from lightrl.config.run_file import CONFIG_FILE, load_config
    from lightrl.daemon.main import DaemonOptions, run
    from lightrl.daemon.parent import leave_when_stdin_closes
    from lightrl.devices.assign import Part
    from lightrl.keys import FILES, access_for, read_key
    from lightrl.launch.daemons import NOT_FINISHED, run_child

    def work() -> int:
        config = load_config(run_dir / CONFIG_FILE)
        if tied:
            leave_when_stdin_closes(config.node.grace_s)
        roles = parse_roles(role)
        options = DaemonOptions(
            name,
            roles,
            run_dir,
            config,
            join=join,
            resume=resume,
            # no node gets a key that it does not need
            key=read_key(run_dir / FILES[access_for(roles)]),
            gpus=Part(tuple(filter(None, gpus.split(","))), gpu_memory),
            shares=shares,
            part=part,
            parallel=parallel,
        )
        return NOT_FINISHED if run(options) else 0

    exit_with(run_child(work))


for command in (
    commands.export,
    commands.serve,
    commands.replay,
    commands.status,
    commands.compare,
    commands.top,
    commands.down,
    commands.drain,
    commands.check,
    commands.data,
    commands.simulate,
):
    app.command()(command)
app.command("config")(commands.reference)
app.command("eval")(commands.evaluate)


def _whole_run(config: "Config", no_tui: bool, resume: bool = False) -> None:
    from lightrl.launch.run import run_here

    exit_with(wait_for(run_here(config, tui=sys.stdout.isatty() and not no_tui, resume=resume)))


def _foreground(config: "Config", options: "DaemonOptions") -> None:
    """Run one daemon with the coordinator in this process."""
    from lightrl.daemon.main import run
    from lightrl.keys import KEY_FILE, read_key
    from lightrl.launch.checks.checklist import checked_config
    from lightrl.launch.local import in_foreground

    settled = checked_config(config, options.roles, options.slots, is_resumed=options.resume)
    name = options.name or default_name()

    def start(run_dir: Path) -> int:
        key = read_key(run_dir / KEY_FILE)
        return run(replace(options, name=name, run_dir=run_dir, config=settled, key=key))

    exit_with(in_foreground(settled, start, options.resume))


def _join(key: Path | None, options: "DaemonOptions") -> None:
    """Run one daemon that joins a run in this process."""
    roles = ",".join(options.roles)
    if not options.join:
        raise typer.BadParameter(f"--role {roles} needs --join tcp://HOST:PORT of the coordinator")
    from lightrl.client.address import require_reachable
    from lightrl.daemon.main import run
    from lightrl.keys import access_for, find_key, require_access
    from lightrl.system.addresses import host_and_port

    address = "tcp://" + options.join.removeprefix("tcp://")
    host_and_port(address)
    text = require_access(find_key(key, None), access_for(options.roles), f"--role {roles} needs")
    require_reachable(address)
    name = options.name or default_name()
    exit_with(run(replace(options, name=name, join=address, key=text)))


def _dry_run(config: "Config", options: "DaemonOptions") -> None:
    from lightrl.config.run_file import to_toml
    from lightrl.devices.plan import describe as describe_devices
    from lightrl.errors import RewardError
    from lightrl.launch.checks.checklist import Launch, judge
    from lightrl.launch.checks.initial import begins_with
    from lightrl.launch.checks.plan import describe, labelled, of_daemon
    from lightrl.launch.checks.weights import describe as describe_weights

    roles, slots = options.roles, options.slots
    launch = Launch(config, roles, slots)
    notes = [found.text for found in judge(launch, "up") if found.is_note]
    config = launch.require_config()
    devices = describe_devices(config, launch.machine, roles, slots)
    here = of_daemon(config, roles, slots)
    lines = describe(here, devices, describe_weights(here, launch.machine), roles)
    lines += labelled("begins with", begins_with(config))
    lines += [f"{'note':12}{note}" for note in notes if note not in devices]
    show([*to_toml(config).split("\n"), *lines])
    refused: list[str] = []
    for found in judge(launch, "dry-run"):
        if found.is_note and found.verdict == "fail":
            refused.append(found.text)
        else:
            show([f"{'note' if found.is_note else found.subject:12}{found.text}"])
    if refused:
        raise RewardError(refused[0])


def _expanded(word: str) -> str:
    """Expand a path, by itself or behind an option, as a shell does without quotes."""
    option, equals, path = word.partition("=") if word.startswith("--") else ("", "", word)
    if not path.startswith(("~", "$")):
        return word
    from lightrl.config.values import expanded

    return option + equals + expanded(path)


def main(arguments: list[str] | None = None) -> None:
    """Run a command. An error for the user is one line; anything else is a bug with a traceback."""
    escape_unencodable()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        app([_expanded(word) for word in words])
    except LightRLError as e:
        text = " ".join(str(e).split())
        if not log.error_for_machines(text):
            print_error(f"lightrl: {text}", style=RED)
        sys.exit(1)


if __name__ == "__main__":
    main()
