"""The command line, the only main. Parses, calls, prints; decides nothing about runs.

`lightrl --help` must stay quick: everything heavier than typer is imported inside the commands.
"""

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from lightrl import arguments
from lightrl.arguments import (
    AsJson,
    KeyFile,
    NameOption,
    NoTui,
    RoleOption,
    Settings,
    Slots,
    Target,
)
from lightrl.errors import ConfigError, LightRLError
from lightrl.say import complain, show

if TYPE_CHECKING:
    from lightrl.config import Config
    from lightrl.messages import Role

RED = "\x1b[31m"
T = TypeVar("T")

app = typer.Typer(
    help="Reinforcement-learning post-training of language models on reserved and "
    "preemptible nodes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def up(
    settings: Settings = None,
    join: Annotated[
        str,
        typer.Option(metavar="tcp://HOST:PORT", help="become a node of that running coordinator"),
    ] = "",
    key: KeyFile = None,
    role: RoleOption = "",
    name: NameOption = "",
    slots: Slots = 0,
    no_tui: NoTui = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="print the resolved config and what it means, start nothing"
        ),
    ] = False,
) -> None:
    """Start a run on this machine, or join one as a node.

    With CONFIG alone: coordinator, trainer and rollout nodes as separate processes here. With
    --role: one daemon with these roles in the foreground. With --join: a node of a running
    coordinator; ctrl-C leaves. Needs the key of that run: --key FILE.
    """
    roles = arguments.roles(role or ("rollout" if join else ""))
    arguments.require_coherent(settings or [], join, roles, name, slots)
    if key is not None and not join:
        raise ConfigError("--key is for --join: a run that is started makes its own key")
    config = arguments.config(settings or [])
    if dry_run:
        _dry_run(config)
    elif roles:
        _foreground(config, join, key, roles, name, slots)
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
    roles = arguments.roles(role)
    arguments.require_coherent([], "", roles, name, slots)
    if roles and "coordinator" not in roles:
        raise typer.BadParameter(
            "--role needs coordinator to resume a run; others join it: lightrl up --join"
        )
    targets, overrides = arguments.split_args(run or [])
    if len(targets) > 1:
        raise ConfigError(f"one RUN is possible, not {len(targets)}: {' '.join(targets)}")
    from lightrl.launch.resume import prepare

    config = prepare(targets[0] if targets else None, overrides, from_checkpoint)
    if roles:
        from lightrl.devices.plan import require_room
        from lightrl.launch.local import in_foreground

        require_room(config, roles, slots)
        _exit(
            in_foreground(
                config, _coordinator(config, roles, name, slots, resume=True), resume=True
            )
        )
    else:
        _whole_run(config, no_tui, resume=True)


@app.command()
def replay(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="default: runs/latest")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="the responses of this step")] = None,
    response: Annotated[str, typer.Option(metavar="ID", help="the tokens of this response")] = "",
    as_json: AsJson = False,
) -> None:
    """Tell what the journal of a run holds: rounds, tokens, scores, versions, damage."""
    from lightrl.client.address import find
    from lightrl.replay.report import replay_json, replay_lines

    _, run_dir = find(run)
    if run_dir is None:
        raise ConfigError(f"{run}: is an address; a journal is read from a run directory")
    if as_json:
        show([replay_json(run_dir, step, response)])
    else:
        show(replay_lines(run_dir, step, response))


@app.command()
def status(addr: Target = None, key: KeyFile = None, as_json: AsJson = False) -> None:
    """Show the nodes, the round and the step of a run."""
    from lightrl.client.find_run import meant, one_snapshot
    from lightrl.launch.report import status_lines
    from lightrl.wire import to_json

    snapshot = _wait_for(one_snapshot(meant(addr, key)))
    show([to_json(snapshot).decode()] if as_json else status_lines(snapshot))


@app.command()
def top(addr: Target = None, key: KeyFile = None) -> None:
    """Watch a running or finished run on a live screen (q leaves, ? shows the keys)."""
    from lightrl.client.find_run import OVER, meant, one_snapshot
    from lightrl.tui.app import show_finished, watch_live

    if not sys.stdout.isatty():
        raise LightRLError("lightrl top needs a terminal; lightrl status prints plain lines")
    target = meant(addr, key)
    now = _wait_for(one_snapshot(target))
    if target.address is None or now.state in OVER:
        _wait_for(show_finished(now))
    else:
        _wait_for(watch_live(target.address, target.key(), True, target.run_dir, first=now))


@app.command()
def down(addr: Target = None, key: KeyFile = None) -> None:
    """Stop a run: no new work, a checkpoint of the steps done, all daemons leave."""
    from lightrl.client import ask
    from lightrl.client.find_run import live_run, meant

    target = meant(addr, key)
    address, _ = _wait_for(live_run(target))
    _wait_for(ask.drain(address, "*", "lightrl down", target.key()))
    print("the run is stopping; lightrl status shows when it is over")


@app.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="as lightrl status names it")],
    addr: Target = None,
    key: KeyFile = None,
) -> None:
    """Let one rollout node go: its responses continue on others."""
    from lightrl.client import ask
    from lightrl.client.find_run import live_run, meant, require_drainable

    target = meant(addr, key)
    address, snapshot = _wait_for(live_run(target))
    require_drainable(snapshot, node)
    _wait_for(ask.drain(address, node, "lightrl drain", target.key()))
    show([f"{node} is leaving"])


@app.command()
def check(settings: Settings = None) -> None:
    """Verify this machine, and a CONFIG if one is given, and say what to do."""
    from lightrl.launch.check import findings

    config = arguments.config(settings or [])
    failed = False
    for finding in findings(config):
        failed |= finding.verdict == "fail"
        show([f"{finding.verdict:5} {finding.subject:14} {finding.text}"])
    _exit(int(failed))


@app.command()
def simulate(
    settings: Settings = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=0, help="rollout nodes that are always there; default: rollout.nodes"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="CSV of more nodes that come and go: milliseconds,add|remove,node"
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            metavar="FILE|RUN|PRESET", help="lengths and speeds; default: a generic guess"
        ),
    ] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, help="default: train.steps, at most 20")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="each mechanism alone, in one table")
    ] = False,
    reproduce: Annotated[
        bool,
        typer.Option(
            "--reproduce", help="no CONFIG: reproduce published figures; LightRL on the same work"
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="all figures, as one line of JSON")
    ] = False,
) -> None:
    """Predict how fast CONFIG would run on a fleet, with the real scheduler."""
    from lightrl.launch.plan import count_prompts
    from lightrl.sim.command import reproduce_published, simulate_run

    if reproduce:
        if settings or nodes is not None or trace or workload or steps or compare:
            raise typer.BadParameter(
                "--reproduce has its own workloads and fleets; only --json goes with it"
            )
        reproduce_published(json_line=as_json)
        return
    config = arguments.config(settings or [])
    if config is None:
        raise typer.BadParameter(
            "give a CONFIG; overrides such as rollout.slots=64 describe the nodes"
        )
    simulate_run(
        config,
        num_prompts=count_prompts(config.data.path),
        nodes=nodes,
        trace=trace,
        workload=workload,
        steps=steps,
        all_variants=compare,
        json_line=as_json,
    )


@app.command()
def slurm(
    settings: Settings = None,
    nodes: Annotated[int, typer.Option(min=0, help="rollout nodes")] = 1,
    partition_reserved: Annotated[str, typer.Option(help="of coordinator and trainer")] = "",
    partition_spot: Annotated[
        str, typer.Option(help="of the rollout nodes, which may be preempted")
    ] = "",
    time: Annotated[str, typer.Option(help="limit of both jobs, as sbatch has it")] = "",
    reserved_args: Annotated[str, typer.Option(help="more for sbatch, '--gpus=8 --mem=0'")] = "",
    spot_args: Annotated[str, typer.Option(help="more for sbatch")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print both scripts, submit nothing")
    ] = False,
) -> None:
    """Run CONFIG on a Slurm cluster: two batch scripts in the run directory, written and
    submitted."""
    config = arguments.config(settings or [])
    if config is None:
        raise typer.BadParameter("give a CONFIG")
    from lightrl.launch.slurm.scripts import SlurmOptions, submit

    options = SlurmOptions(
        nodes, partition_reserved, partition_spot, time, reserved_args, spot_args
    )
    print("\n".join(submit(config, options, dry_run)))


@app.command("slurm-job", hidden=True)
def slurm_job(part: str, what: list[str], slots: Slots = 0) -> None:
    """What the scripts run: head CONFIG [section.key=value ...], node RUN_DIR, node ADDRESS
    KEY_FILE."""
    from lightrl.launch.slurm.job import run_part

    _exit(_wait_for(run_part(part, what, slots)))


@app.command("config")
def reference() -> None:
    """Print every config key with its default and meaning."""
    from lightrl.config import keys

    section = ""
    for key, default, description in keys():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            print(f"\n[{section}]")
        print(f"{key:32} {default:22} {description}".rstrip())


@app.command(hidden=True)
def daemon(
    name: Annotated[str, typer.Option()],
    role: Annotated[str, typer.Option()],
    run_dir: Annotated[Path, typer.Option()],
    join: Annotated[str, typer.Option()] = "",
    tied: Annotated[bool, typer.Option("--tied", help="leave when stdin closes")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="a coordinator: go on from the journal")
    ] = False,
    gpus: Annotated[str, typer.Option(help="for CUDA_VISIBLE_DEVICES of its children")] = "",
    gpu_memory: Annotated[float, typer.Option(help="share of them that its engine may take")] = 0.0,
) -> None:
    """One daemon of a run on this machine, started by `lightrl up`."""
    from lightrl.daemon.main import DaemonOptions, run
    from lightrl.daemon.parent import leave_when_stdin_closes
    from lightrl.devices.assign import Part
    from lightrl.keys import JOIN_FILE, KEY_FILE, read_key
    from lightrl.launch.daemons import NOT_FINISHED
    from lightrl.run_file import load_config

    config = load_config(run_dir / "config.toml")
    if tied:
        leave_when_stdin_closes(config.node.grace_s)
    part, roles = Part(tuple(filter(None, gpus.split(","))), gpu_memory), arguments.roles(role)
    # no more than it needs
    key = read_key(run_dir / (JOIN_FILE if roles == ("rollout",) else KEY_FILE))
    options = DaemonOptions(
        name, roles, run_dir, config, join or None, resume=resume, key=key, gpus=part
    )
    _exit(NOT_FINISHED if run(options) else 0)  # else 1 of an error, or of a crash


def _whole_run(config: "Config", no_tui: bool, resume: bool = False) -> None:
    from lightrl.launch.run import run_here

    _exit(_wait_for(run_here(config, tui=sys.stdout.isatty() and not no_tui, resume=resume)))


def _foreground(
    config: "Config | None",
    join: str,
    key: Path | None,
    roles: "tuple[Role, ...]",
    name: str,
    slots: int,
) -> None:
    """One daemon in this process."""
    if "coordinator" in roles:
        if config is None:
            raise typer.BadParameter("--role coordinator needs a CONFIG")
        if join:
            raise typer.BadParameter("a coordinator does not --join another one")
        from lightrl.devices.plan import require_room
        from lightrl.launch.preflight import require_files, require_new

        require_files(config)
        require_new(config)
        require_room(config, roles, slots)
        from lightrl.launch.local import in_foreground

        _exit(in_foreground(config, _coordinator(config, roles, name, slots)))
    elif not join:
        raise typer.BadParameter(
            f"--role {','.join(roles)} needs --join tcp://HOST:PORT of the coordinator"
        )
    else:
        from lightrl.client.address import require_reachable
        from lightrl.keys import find_key, require_full
        from lightrl.system.addresses import host_and_port

        join = "tcp://" + join.removeprefix("tcp://")
        host_and_port(join)
        text = find_key(key, None)
        if roles != ("rollout",):
            require_full(text, f"--role {','.join(roles)} needs")
        require_reachable(join)
        from lightrl.daemon.main import DaemonOptions, run

        _exit(
            run(
                DaemonOptions(
                    name or arguments.default_name(), roles, join=join, slots=slots, key=text
                )
            )
        )


def _coordinator(
    config: "Config", roles: "tuple[Role, ...]", name: str, slots: int, resume: bool = False
) -> Callable[[Path], int]:
    """Runs a daemon with that role, given its run directory."""
    from lightrl.daemon.main import DaemonOptions, run
    from lightrl.keys import KEY_FILE, read_key

    def daemon(run_dir: Path) -> int:
        key = read_key(run_dir / KEY_FILE)
        node = name or arguments.default_name()
        return run(DaemonOptions(node, roles, run_dir, config, slots=slots, resume=resume, key=key))

    return daemon


def _dry_run(config: "Config | None") -> None:
    from lightrl.devices.plan import describe as describe_devices
    from lightrl.launch.plan import describe
    from lightrl.launch.preflight import require_files
    from lightrl.run_file import to_toml

    if config is None:
        raise typer.BadParameter("--dry-run needs a CONFIG")
    require_files(config)
    devices = describe_devices(config)
    show(f"{to_toml(config)}\n{describe(config, devices)}".split("\n"))


def _wait_for(work: "Coroutine[object, object, T]") -> T:
    import asyncio

    return asyncio.run(work)


def _exit(status: int) -> None:
    if status:
        raise typer.Exit(status)


def main(arguments: list[str] | None = None) -> None:
    """What a user can do something about is one line; anything else is a bug and shows its
    traceback."""
    try:
        app(arguments)
    except LightRLError as e:
        complain(f"lightrl: {' '.join(str(e).split())}", style=RED)
        sys.exit(1)


if __name__ == "__main__":
    main()
