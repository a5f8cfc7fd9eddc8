"""What users write on the command line: the options that several commands share, and how they are
read.

Owns syntax and what must not be combined; runs nothing. Must stay quick to import.
"""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from lightrl.errors import ConfigError

if TYPE_CHECKING:
    from lightrl.config.schema import Config
    from lightrl.daemon.main import DaemonOptions
    from lightrl.messages.nodes import Role

MAX_NAME = 64  # characters of a node's name

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[ADDR]",
        help="tcp://HOST:PORT, a run directory, a run's name; default: runs/latest",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="RUN_DIR/key or, to add a node, RUN_DIR/join; default: LIGHTRL_KEY, else the run "
        "directory's",
    ),
]
RoleOption = Annotated[
    str,
    typer.Option(
        "--role", metavar="ROLE,...", help="coordinator, trainer, rollout: one daemon with these"
    ),
]
NameOption = Annotated[str, typer.Option("--name", help="of this node; default: HOST-PID")]
Slots = Annotated[
    int,
    typer.Option(
        "--slots",
        min=0,
        max=65536,
        show_default=False,
        help="responses at once here; default: rollout.slots",
    ),
]
Preemptible = Annotated[
    bool,
    typer.Option(
        "--preemptible",
        help="this node may be taken away at any moment: no broadcast of weights waits for it",
    ),
]
SharesOption = Annotated[
    str,
    typer.Option(
        "--shares",
        metavar="TRAINER",
        help="this node's engine uses the devices of that trainer node, in turn with it",
    ),
]
PartOption = Annotated[
    int,
    typer.Option(
        "--part",
        min=0,
        show_default=False,
        help="which part of these devices, where each replica of the model changes sides by itself",
    ),
]
ParallelOption = Annotated[
    int,
    typer.Option(
        "--parallel",
        min=0,
        show_default=False,
        help="this node's engine spans so many devices, one of rollout.parallel, and takes turns "
        "with engines of other sizes over them",
    ),
]
FromOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="RUN|CHECKPOINT",
        help="begin with another run's weights, optimizer and schedule, of its newest checkpoint "
        "or of this one",
    ),
]
NoTui = Annotated[bool, typer.Option("--no-tui", help="plain lines instead of the screen")]
AsJson = Annotated[bool, typer.Option("--json", help="all that is known, as one line of JSON")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [section.key=value ...]", help="a TOML file; values that override it"
    ),
]


def require_coherent(settings: list[str], options: "DaemonOptions") -> None:
    """No option of a user may be ignored. Raises ConfigError, one line."""
    roles, name, shares, parallel = options.roles, options.name, options.shares, options.parallel
    if options.join and settings and "coordinator" not in roles:
        raise ConfigError(
            "--join: a joining node takes its config from the coordinator; leave out "
            f"{' '.join(settings)}"
        )
    if options.slots and "rollout" not in roles:
        raise ConfigError(
            "--slots is for one rollout daemon: --join, or --role ...,rollout; else set "
            "rollout.slots"
        )
    for option in ("preemptible", "shares", "parallel"):
        given = options.is_preemptible if option == "preemptible" else getattr(options, option)
        if given and roles != ("rollout",):
            raise ConfigError(f"--{option} is for one rollout daemon that has to --join a run")
    if options.part and not shares:
        raise ConfigError(f"--part {options.part}: of whose devices? give --shares TRAINER")
    if shares and options.is_preemptible:
        raise ConfigError(f"--shares {shares}: a node that may be taken away has its own devices")
    if parallel and options.is_preemptible:
        raise ConfigError(
            f"--parallel {parallel}: a node that may be taken away has engines of one size"
        )
    if parallel and shares:
        raise ConfigError(
            f"--parallel {parallel}: takes turns with other engines, and --shares {shares} with "
            "the trainer; leave one of them out"
        )
    if name and not roles:
        raise ConfigError("--name is for one daemon: --join or --role; else set run.name")
    if name:
        from lightrl.config.sections import NAME_PATTERN

        if len(name) > MAX_NAME or not re.fullmatch(NAME_PATTERN, name):
            what = f"a letter or digit, then letters, digits, . _ -; at most {MAX_NAME} in all"
            raise ConfigError(f"--name {name!r}: is not a name: {what}")


def config(settings: list[str], initial: str = "") -> "Config | None":
    """The config that the arguments describe; None if there are none. `initial`: --from."""
    files, overrides = split_args(settings)
    if len(files) > 1:
        raise ConfigError(f"one CONFIG is possible, not {len(files)}: {' '.join(files)}")
    if not files:
        if overrides:
            raise ConfigError(f"{overrides[0]}: there is no CONFIG to override; name a TOML file")
        if initial:
            raise ConfigError(f"--from {initial}: is for a run that is started; name its CONFIG")
        return None
    from lightrl.config.run_file import load_config

    config = load_config(Path(files[0]), overrides)
    if not initial:
        return config
    from lightrl.launch.initial import begun_from

    return begun_from(config, initial)


def split_args(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of files or runs, and overrides."""
    return [s for s in settings if "=" not in s], [s for s in settings if "=" in s]


def roles(text: str) -> "tuple[Role, ...]":
    from lightrl.messages.nodes import Role

    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = get_args(Role)
    if text and not chosen:
        raise typer.BadParameter(f"--role {text}: roles are {', '.join(known)}")
    for part in chosen:
        if part not in known:
            raise typer.BadParameter(f"--role {part}: roles are {', '.join(known)}")
    return cast("tuple[Role, ...]", chosen)


def default_name() -> str:
    return f"{socket.gethostname().split('.')[0][: MAX_NAME - 20]}-{os.getpid()}"
