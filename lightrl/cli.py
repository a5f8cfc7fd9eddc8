"""The command line, the only main. Parses, calls, prints; decides nothing about runs.

`lightrl --help` must stay quick: everything heavier than typer is imported inside the commands.
"""

import re
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast, get_args

import typer

from lightrl.errors import ConfigError, LightRLError

if TYPE_CHECKING:
    from lightrl.config import Config
    from lightrl.messages import Role

T = TypeVar("T")

MAX_NAME = 64  # characters of a node's name

app = typer.Typer(
    help="Reinforcement-learning post-training of language models on reserved and preemptible nodes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[ADDR]", help="tcp://HOST:PORT, a run directory, a run's name; default: runs/latest"
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [section.key=value ...]", help="a TOML file; values that override it"),
]


@app.command()
def up(
    settings: Settings = None,
    join: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="become a node of that running coordinator")
    ] = "",
    role: Annotated[
        str,
        typer.Option(metavar="ROLE,...", help="coordinator, trainer, rollout: one daemon with these"),
    ] = "",
    name: Annotated[str, typer.Option(help="of this node; default: HOST-PID")] = "",
    slots: Annotated[
        int, typer.Option(min=0, help="responses at once on this node; default: rollout.slots")
    ] = 0,
    no_tui: Annotated[bool, typer.Option("--no-tui", help="plain lines instead of the screen")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the resolved config and what it means, start nothing")
    ] = False,
) -> None:
    """Start a run on this machine, or join one as a node.

    With CONFIG alone: coordinator, trainer and rollout nodes as separate processes here. With --role: one
    daemon with these roles in the foreground. With --join: a node of a running coordinator; ctrl-C leaves.
    """
    roles = _roles(role or ("rollout" if join else ""))
    _require_coherent(settings or [], join, roles, name, slots)
    config = _config(settings or [])
    if dry_run:
        _dry_run(config)
    elif roles:
        _foreground(config, join, roles, name, slots)
    elif config is None:
        raise typer.BadParameter("give a CONFIG to start a run, or --join tcp://HOST:PORT to join one")
    else:
        from lightrl.launch.run import run_here

        _exit(_wait_for(run_here(config, tui=sys.stdout.isatty() and not no_tui)))


@app.command()
def status(
    addr: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="all that is known, as one line of JSON")] = False,
) -> None:
    """Show the nodes, the round and the step of a run."""
    from lightrl.launch.report import status_lines
    from lightrl.launch.running import one_snapshot
    from lightrl.wire import to_json

    snapshot = _wait_for(one_snapshot(addr))
    print(to_json(snapshot).decode() if as_json else "\n".join(status_lines(snapshot)))


@app.command()
def top(addr: Target = None) -> None:
    """Watch a running or finished run on a live screen (q leaves, ? shows the keys)."""
    from lightrl.launch.address import find
    from lightrl.launch.running import OVER, one_snapshot
    from lightrl.tui.app import show_finished, watch_live

    if not sys.stdout.isatty():
        raise LightRLError("lightrl top needs a terminal; lightrl status prints plain lines")
    address, run_dir = find(addr)
    now = _wait_for(one_snapshot(addr))
    if address is None or now.state in OVER:
        _wait_for(show_finished(now))
    else:
        _wait_for(watch_live(address, stay=True, run_dir=run_dir))


@app.command()
def down(addr: Target = None) -> None:
    """Stop a run: no new work, a checkpoint of the steps done, all daemons leave."""
    from lightrl.launch.running import live_run
    from lightrl.node import client

    address, _ = _wait_for(live_run(addr))
    _wait_for(client.drain(address, "*", "lightrl down"))
    print("the run is stopping; lightrl status shows when it is over")


@app.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="as lightrl status names it")],
    addr: Target = None,
) -> None:
    """Let one rollout node go: its responses continue on others."""
    from lightrl.launch.running import live_run, require_drainable
    from lightrl.node import client

    address, snapshot = _wait_for(live_run(addr))
    require_drainable(snapshot, node)
    _wait_for(client.drain(address, node, "lightrl drain"))
    print(f"{node} is leaving")


@app.command()
def check(settings: Settings = None) -> None:
    """Verify this machine, and a CONFIG if one is given, and say what to do."""
    from lightrl.launch.check import findings

    config = _config(settings or [])
    failed = False
    for finding in findings(config):
        failed |= finding.verdict == "fail"
        print(f"{finding.verdict:5} {finding.subject:14} {finding.text}")
    _exit(int(failed))


@app.command()
def simulate(
    settings: Settings = None,
    nodes: Annotated[
        int | None, typer.Option(min=0, help="rollout nodes that are always there; default: rollout.nodes")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of more nodes that come and go: milliseconds,add|remove,node"),
    ] = None,
    workload: Annotated[
        str, typer.Option(metavar="FILE|RUN|PRESET", help="lengths and speeds; default: a generic guess")
    ] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="default: train.steps, at most 20")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="each mechanism alone, in one table")] = False,
    reproduce: Annotated[
        bool,
        typer.Option("--reproduce", help="no CONFIG: published figures again, and LightRL on the same work"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="all figures, as one line of JSON")] = False,
) -> None:
    """Predict how fast a run of CONFIG would be on a fleet, with the scheduler that it would have."""
    from lightrl.launch.plan import count_prompts
    from lightrl.sim.command import reproduce_published, simulate_run

    if reproduce:
        if settings or nodes is not None or trace or workload or steps or compare:
            raise typer.BadParameter("--reproduce has its own workloads and fleets; only --json goes with it")
        reproduce_published(json_line=as_json)
        return
    config = _config(settings or [])
    if config is None:
        raise typer.BadParameter("give a CONFIG; rollout.slots=64 and the like say more of the nodes")
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
) -> None:
    """One daemon of a run on this machine, started by `lightrl up`."""
    from lightrl.launch.tie import leave_when_stdin_closes
    from lightrl.node.daemon import DaemonOptions, run
    from lightrl.run_file import load_config

    config = load_config(run_dir / "config.toml")
    if tied:
        leave_when_stdin_closes(config.node.grace_s)
    _exit(run(DaemonOptions(name, _roles(role), run_dir, config, join or None)))


def _foreground(config: "Config | None", join: str, roles: "tuple[Role, ...]", name: str, slots: int) -> None:
    """One daemon in this process."""
    name = name or _default_name()
    if "coordinator" in roles:
        if config is None:
            raise typer.BadParameter("--role coordinator needs a CONFIG")
        if join:
            raise typer.BadParameter("a coordinator does not --join another one")
        from lightrl.launch.preflight import require_files, require_new

        require_files(config)
        require_new(config)
        from lightrl.launch.local import in_foreground
        from lightrl.node.daemon import DaemonOptions, run

        _exit(in_foreground(config, lambda d: run(DaemonOptions(name, roles, d, config, slots=slots))))
    elif not join:
        raise typer.BadParameter(f"--role {','.join(roles)} needs --join tcp://HOST:PORT of the coordinator")
    else:
        from lightrl.launch.address import require_reachable

        join = "tcp://" + join.removeprefix("tcp://")
        require_reachable(join)
        from lightrl.node.daemon import DaemonOptions, run

        _exit(run(DaemonOptions(name, roles, join=join, slots=slots)))


def _require_coherent(
    settings: list[str], join: str, roles: "tuple[Role, ...]", name: str, slots: int
) -> None:
    """Nothing that a user says may be ignored. Raises ConfigError, one line."""
    if join and settings and "coordinator" not in roles:
        raise ConfigError(
            f"--join: a joining node takes its config from the coordinator; leave out {' '.join(settings)}"
        )
    if slots and "rollout" not in roles:
        raise ConfigError(
            "--slots is for one rollout daemon: --join, or --role ...,rollout; else set rollout.slots"
        )
    if name and not roles:
        raise ConfigError("--name is for one daemon: --join or --role; else set run.name")
    if name:
        from lightrl.config import NAME_PATTERN

        if len(name) > MAX_NAME or not re.fullmatch(NAME_PATTERN, name):
            what = f"a letter or digit, then letters, digits, . _ -; at most {MAX_NAME} in all"
            raise ConfigError(f"--name {name!r}: is not a name: {what}")


def _dry_run(config: "Config | None") -> None:
    from lightrl.launch.plan import describe
    from lightrl.launch.preflight import require_files
    from lightrl.run_file import to_toml

    if config is None:
        raise typer.BadParameter("--dry-run needs a CONFIG")
    require_files(config)
    print(to_toml(config))
    print(describe(config))


def _config(settings: list[str]) -> "Config | None":
    """The config that the arguments describe; None if there are none."""
    files = [s for s in settings if "=" not in s]
    overrides = [s for s in settings if "=" in s]
    if len(files) > 1:
        raise ConfigError(f"one CONFIG is possible, not {len(files)}: {' '.join(files)}")
    if not files:
        if overrides:
            raise ConfigError(f"{overrides[0]}: there is no CONFIG to override; name a TOML file")
        return None
    from lightrl.run_file import load_config

    return load_config(Path(files[0]), overrides)


def _roles(text: str) -> "tuple[Role, ...]":
    from lightrl.messages import Role

    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = get_args(Role)
    if text and not chosen:
        raise typer.BadParameter(f"--role {text}: roles are {', '.join(known)}")
    for part in chosen:
        if part not in known:
            raise typer.BadParameter(f"--role {part}: roles are {', '.join(known)}")
    return cast("tuple[Role, ...]", chosen)


def _default_name() -> str:
    import os
    import socket

    return f"{socket.gethostname().split('.')[0][: MAX_NAME - 20]}-{os.getpid()}"


def _wait_for(work: "Coroutine[object, object, T]") -> T:
    import asyncio

    return asyncio.run(work)


def _exit(status: int) -> None:
    if status:
        raise typer.Exit(status)


def main(arguments: list[str] | None = None) -> None:
    """What a user can do something about is one line; anything else is a bug and shows its traceback."""
    try:
        app(arguments)
    except LightRLError as e:
        red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        print(f"{red}lightrl: {' '.join(str(e).split())}{plain}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
