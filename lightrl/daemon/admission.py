"""Check what a node accepts from a welcome, and within which bounds: the config and the model's
small files.

The sender has the key of the run, but may be broken or of another release. So names and sizes of
files are bounded, and nothing is written outside the node's own folder.
"""

import re
from pathlib import Path

from pydantic import ValidationError

from lightrl.config.schema import Config
from lightrl.errors import ConfigError, PeerUnreachable, ProtocolError
from lightrl.messages.fields import MAX_FILE_BYTES, MAX_FILES
from lightrl.messages.nodes import ENDING, TAKEN, Welcome

MAX_FILES_BYTES = MAX_FILE_BYTES  # in all
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}")


def config_of(welcome: Welcome) -> Config:
    """Return the config of a welcome. Raises ProtocolError, one line, if it is not one of this
    release."""
    try:
        return Config.model_validate_json(welcome.config_json)
    except (ValidationError, ValueError, RecursionError) as e:
        what = str(e).replace("\n", " ")[:200]
        raise ProtocolError(
            f"the coordinator sent a config that this release does not understand: {what}"
        ) from None


def require_welcome(welcome: Welcome) -> None:
    """Raise PeerUnreachable if the welcome is a refusal."""
    if welcome.refused:
        raise PeerUnreachable(f"the coordinator refuses this node: {welcome.refused}")


def require_kept(welcome: Welcome) -> None:
    """Raise PeerUnreachable if the coordinator refuses a node that it had admitted."""
    if welcome.refused not in {ENDING, TAKEN}:
        require_welcome(welcome)


def require_shared(config: Config, shares: str) -> None:
    """Raise ConfigError if the node shares devices, and the run has none that are shared."""
    if shares and config.rollout.placement != "shared":
        raise ConfigError(
            f"--shares {shares}: in this run no devices are shared: rollout.placement = "
            f"{config.rollout.placement!r}"
        )


def require_environment(config: Config) -> None:
    """Raise ConfigError if the run has no episodes."""
    if not config.environment.enabled:
        raise ConfigError("--role environment: this run has none, see the section environment")


def require_size(config: Config, parallel: int) -> None:
    """Raise ConfigError if the node's engine has a size that this run does not use."""
    if parallel and parallel not in config.rollout.parallel:
        raise ConfigError(
            f"--parallel {parallel}: engines of this run take turns in these sizes: "
            f"rollout.parallel = {list(config.rollout.parallel)}"
        )


def is_same_config(one: Config | None, other: Config) -> bool:
    """Return whether a node may continue with `one` when the coordinator has `other`.

    The run directory, on the coordinator's machine, may be another one after a resume.
    """
    if one is None:
        return False
    run = other.run.model_copy(update={"dir": one.run.dir})
    return one == other.model_copy(update={"run": run})


def write_model_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write `files` to a new `folder`. Raises ProtocolError before anything is written."""
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_FILES_BYTES:
        size = sum(map(len, files.values()))
        raise ProtocolError(f"the coordinator sent {len(files)} model files of {size} bytes")
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise ProtocolError(f"model file {name[:80]!r} is not a plain name")
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
