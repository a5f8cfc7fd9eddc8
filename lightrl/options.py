"""The command line's syntax: the options that several commands share, and how they are read.

Refuses combinations of options; runs nothing. Must stay quick to import.
"""

import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from lightrl.errors import ConfigError

if TYPE_CHECKING:
    from lightrl.config.schema import Config
    from lightrl.daemon.main import DaemonOptions
    from lightrl.messages.nodes import Role

MAX_NAME = 64  # characters of a node's name

TARGET = "tcp://HOST:PORT, a run directory, a run's name; default: runs/latest"
Target = Annotated[str | None, typer.Argument(metavar="[ADDR]", help=TARGET)]
KEY = "RUN_DIR/key or, for a node, RUN_DIR/join or /environment; default: LIGHTRL_KEY or RUN_DIR's"
KeyFile = Annotated[Path | None, typer.Option("--key", metavar="FILE", help=KEY)]
ROLES = "coordinator, trainer, rollout: one daemon with these; or environment"
RoleOption = Annotated[str, typer.Option("--role", metavar="ROLE,...", help=ROLES)]
NameOption = Annotated[str, typer.Option("--name", help="of this node; default: HOST-PID")]
SLOTS = "concurrent responses or episodes on this node; default: rollout.slots, environment.slots"
Slots = Annotated[int, typer.Option("--slots", min=0, max=65536, show_default=False, help=SLOTS)]
PREEMPTIBLE = "this node may be taken away at any moment: no broadcast of weights waits for it"
Preemptible = Annotated[bool, typer.Option("--preemptible", help=PREEMPTIBLE)]
SHARES = "this node's engine uses the devices of that trainer node, in turn with it"
SharesOption = Annotated[str, typer.Option("--shares", metavar="TRAINER", help=SHARES)]
PART = "the part of these devices, if replicas of the model change sides one by one"
PartOption = Annotated[int, typer.Option("--part", min=0, show_default=False, help=PART)]
PARALLEL = "GPUs of this node's engine, one of rollout.parallel: it takes turns with other sizes"
ParallelOption = Annotated[
    int, typer.Option("--parallel", min=0, show_default=False, help=PARALLEL)
]
WORKERS = "processes of this environment node; default: environment.workers"
WorkersOption = Annotated[int, typer.Option("--workers", min=0, show_default=False, help=WORKERS)]
FROM = "begin with another run's weights, optimizer and schedule: its newest checkpoint, or this"
FromOption = Annotated[str, typer.Option("--from", metavar="RUN|CHECKPOINT", help=FROM)]
NoTui = Annotated[bool, typer.Option("--no-tui", help="plain lines instead of the screen")]
AsJson = Annotated[bool, typer.Option("--json", help="all that is known, as one line of JSON")]
SETTINGS = "[CONFIG] [section.key=value ...]"
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar=SETTINGS, help="a TOML file; values that override it"),
]


def require_coherent(settings: list[str], options: "DaemonOptions") -> None:
    """Raise ConfigError, one line, for an option that would be ignored."""
    for problem in _problems(settings, options):
        raise ConfigError(problem)


def _problems(settings: list[str], o: "DaemonOptions") -> Iterator[str]:
    if o.join and settings and "coordinator" not in o.roles:
        given = " ".join(settings)
        yield f"--join: a joining node takes its config from the coordinator; leave out {given}"
    if o.slots and not {"rollout", "environment"}.intersection(o.roles):
        one = "--join, or --role ...,rollout"
        yield f"--slots is for one rollout daemon: {one}; else set rollout.slots"
    if "environment" in o.roles and {"trainer", "rollout"}.intersection(o.roles):
        yield f"--role {','.join(o.roles)}: an environment node is a daemon of its own"
    if o.workers and "environment" not in o.roles:
        yield "--workers is for --role environment; else set environment.workers"
    of_rollout = {"preemptible": o.is_preemptible, "shares": o.shares, "parallel": o.parallel}
    for option, given in of_rollout.items():
        if given and o.roles != ("rollout",):
            yield f"--{option} is for one rollout daemon that has to --join a run"
    if o.part and not o.shares:
        yield f"--part {o.part}: of whose devices? give --shares TRAINER"
    if o.shares and o.is_preemptible:
        yield f"--shares {o.shares}: a node that may be taken away has its own devices"
    if o.parallel and o.is_preemptible:
        yield f"--parallel {o.parallel}: a node that may be taken away has engines of one size"
    if o.parallel and o.shares:
        turns = f"takes turns with other engines, and --shares {o.shares} with the trainer"
        yield f"--parallel {o.parallel}: {turns}; leave one of them out"
    if o.name and not o.roles:
        yield "--name is for one daemon: --join or --role; else set run.name"
    if o.name:
        from lightrl.config.sections import NAME_PATTERN

        if len(o.name) > MAX_NAME or not re.fullmatch(NAME_PATTERN, o.name):
            what = f"a letter or digit, then letters, digits, . _ -; at most {MAX_NAME} in all"
            yield f"--name {o.name!r}: is not a name: {what}"


def read_config(settings: Sequence[str], initial: str = "") -> "Config | None":
    """Return the config that the arguments describe; None if there are none. `initial`: --from."""
    file, overrides = split_args(settings, "CONFIG")
    if not file:
        if overrides:
            raise ConfigError(f"{overrides[0]}: there is no CONFIG to override; name a TOML file")
        if initial:
            raise ConfigError(f"--from {initial}: is for a run that is started; name its CONFIG")
        return None
    from lightrl.config.run_file import load_config

    config = load_config(Path(file), overrides)
    if not initial:
        return config
    from lightrl.launch.checks.initial import begun_from

    return begun_from(config, initial)


def required_config(settings: Sequence[str], initial: str = "", more: str = "") -> "Config":
    """Return the config of `read_config`; raise BadParameter without a CONFIG."""
    if (config := read_config(settings, initial)) is None:
        raise typer.BadParameter(f"give a CONFIG{more}")
    return config


def split_args(settings: Sequence[str], what: str) -> tuple[str, list[str]]:
    """Return the name of a file or run, "" without one, and the overrides. `what`: of the name."""
    names = [s for s in settings if "=" not in s]
    if len(names) > 1:
        raise ConfigError(f"one {what} is possible, not {len(names)}: {' '.join(names)}")
    return "".join(names), [s for s in settings if "=" in s]


def parse_roles(text: str) -> "tuple[Role, ...]":
    from lightrl.messages.nodes import Role

    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = get_args(Role)
    unknown = [part for part in chosen if part not in known]
    if unknown or (text and not chosen):
        wrong = unknown[0] if unknown else text
        raise typer.BadParameter(f"--role {wrong}: roles are {', '.join(known)}")
    return cast("tuple[Role, ...]", chosen)


def default_role(key: Path | None) -> str:
    """Return the role of a node that joins with this key, as `find_key` finds it."""
    from lightrl.keys import Access, access_of, find_key

    try:
        return "environment" if access_of(find_key(key, None)) is Access.ENVIRONMENT else "rollout"
    except ConfigError:
        return "rollout"  # reported when it joins


def default_name() -> str:
    return f"{socket.gethostname().split('.')[0][: MAX_NAME - 20]}-{os.getpid()}"
