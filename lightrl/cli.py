"""The command line, the only main. Parses, calls, prints; decides nothing about runs.

`lightrl --help` must stay quick: everything heavier than typer is imported inside the commands.
"""

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
    config = _config(settings or [])
    if dry_run:
        _dry_run(config)
    elif role or join:
        _foreground(config, join, role, name, slots)
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
    from lightrl.launch.report import one_snapshot, status_lines
    from lightrl.wire import to_json

    snapshot = _wait_for(one_snapshot(addr))
    print(to_json(snapshot).decode() if as_json else "\n".join(status_lines(snapshot)))


@app.command()
def top(addr: Target = None) -> None:
    """Watch a running or finished run on a live screen (q leaves, ? shows the keys)."""
    from lightrl.launch.address import find
    from lightrl.launch.report import final_snapshot
    from lightrl.tui.app import show_finished, watch_live

    if not sys.stdout.isatty():
        raise LightRLError("lightrl top needs a terminal; lightrl status prints plain lines")
    address, run_dir = find(addr)
    last = final_snapshot(run_dir) if run_dir else None
    if last is not None:
        _wait_for(show_finished(last))
    elif address is None:
        raise LightRLError(f"{run_dir}: this run never listened; see {run_dir}/logs")
    else:
        _wait_for(watch_live(address, stay=True))


@app.command()
def down(addr: Target = None) -> None:
    """Stop a run: no new work, a last checkpoint, all daemons leave."""
    from lightrl.node import client

    _wait_for(client.drain(_address(addr), "*", "lightrl down"))
    print("the run is stopping; lightrl status shows when it is over")


@app.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="as lightrl status names it")],
    addr: Target = None,
) -> None:
    """Let one node go: its responses continue on others."""
    from lightrl.launch.report import one_snapshot
    from lightrl.node import client

    address = _address(addr)
    names = [n.name for n in _wait_for(one_snapshot(address)).nodes if n.state != "gone"]
    if node not in names:
        raise LightRLError(f"{node}: no such node; there are {', '.join(names) or 'none'}")
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
    from lightrl.config import load_config
    from lightrl.launch.tie import leave_when_stdin_closes
    from lightrl.node.daemon import DaemonOptions, run

    config = load_config(run_dir / "config.toml")
    if tied:
        leave_when_stdin_closes(config.node.grace_s)
    _exit(run(DaemonOptions(name, _roles(role), run_dir, config, join or None)))


def _foreground(config: "Config | None", join: str, role: str, name: str, slots: int) -> None:
    """One daemon in this process."""
    from lightrl.launch.address import require_reachable

    roles = _roles(role) if role else cast("tuple[Role, ...]", ("rollout",))
    run_dir = None
    if "coordinator" in roles:
        if config is None:
            raise typer.BadParameter("--role coordinator needs a CONFIG")
        if join:
            raise typer.BadParameter("a coordinator does not --join another one")
        from lightrl.launch.local import create_run_dir, point_latest
        from lightrl.launch.preflight import require_files, require_new

        require_files(config)
        require_new(config)
        run_dir = create_run_dir(config)
        point_latest(run_dir)
    elif not join:
        raise typer.BadParameter(f"--role {role} needs --join tcp://HOST:PORT of the coordinator")
    else:
        join = "tcp://" + join.removeprefix("tcp://")
        require_reachable(join)
    from lightrl.node.daemon import DaemonOptions, run

    _exit(run(DaemonOptions(name or _default_name(), roles, run_dir, config, join or None, slots)))


def _dry_run(config: "Config | None") -> None:
    from lightrl.config import to_toml
    from lightrl.launch.plan import describe
    from lightrl.launch.preflight import require_files

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
    from lightrl.config import load_config

    return load_config(Path(files[0]), overrides)


def _roles(text: str) -> "tuple[Role, ...]":
    from lightrl.messages import Role

    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = get_args(Role)
    for part in chosen:
        if part not in known:
            raise typer.BadParameter(f"--role {part}: roles are {', '.join(known)}")
    return cast("tuple[Role, ...]", chosen)


def _address(target: str | None) -> str:
    """Of a run that should answer."""
    from lightrl.launch.address import find
    from lightrl.launch.report import final_snapshot

    address, run_dir = find(target)
    if run_dir is not None and final_snapshot(run_dir) is not None:
        raise LightRLError(f"{run_dir}: this run is over")
    if address is None:
        raise LightRLError(f"{run_dir}: this run never listened; see {run_dir}/logs")
    return address


def _default_name() -> str:
    import os
    import socket

    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"


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
