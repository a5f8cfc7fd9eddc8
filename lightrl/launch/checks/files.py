"""Refuse to start a run: files are missing, a name or a port is taken, or cores are too few.

Each refusal is one line. Runs no user code and reads no data.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from lightrl.client.address import require_free, require_other_port, require_weights_port
from lightrl.config.data import DataSet
from lightrl.config.run_file import CONFIG_FILE
from lightrl.config.schema import Config
from lightrl.config.values import VERIFIERS
from lightrl.coordinator.descriptors import require_room
from lightrl.coordinator.settings import require_context
from lightrl.data.sources import require_there
from lightrl.engine.start import resolve_engine
from lightrl.errors import ConfigError, DataError
from lightrl.launch.checks.model import require_dtypes, require_engine, require_targets
from lightrl.launch.folder import is_new
from lightrl.messages.nodes import Role
from lightrl.metrics.sinks import require_installed
from lightrl.model_files import (
    HUB_ID,
    folder_here,
    require_no_code,
    require_trainable,
    stored_tensors,
)
from lightrl.rewards.kept import FOLDER
from lightrl.system.threads import num_cores
from lightrl.trainer.checkpoint.on_disk import MODEL
from lightrl.wire import MAX_FRAME_BYTES

BYTES_OF_TOKEN = 8  # its id and its logprob


def require_files(config: Config) -> None:
    """Raise ConfigError for the first file of the config that is missing or not usable, and for a
    group that does not fit into a message."""
    require_room(config)
    _require_small_groups(config)
    _require_model(config)
    several = (("data", config.data, config.data.all_sets), ("eval", config.eval, config.eval_sets))
    for name, section, sets in several:
        for one in sets:
            _require_data(f"{name}.{'sets.' if section.sets else ''}path", one, config)
    if (command := config.reward.command) and shutil.which(command[0]) is None:
        raise ConfigError(f"reward.command = {command[0]!r}: no such program on this machine")
    _require_functions("reward.functions", config.reward.functions, config)
    _require_environment(config)
    if config.checkpoint.dir:
        _require_place("checkpoint.dir", config.checkpoint.dir)


def require_here(config: Config, roles: Sequence[Role] = ()) -> None:
    """Raise ConfigError if this machine cannot start a daemon with these `roles`; () = all daemons
    of a run."""
    nodes, port = config.train.nodes, config.node.weights_port
    if not roles:
        if nodes > 1 and port:
            raise ConfigError(
                f"node.weights_port = {port}: train.nodes = {nodes} start on this machine, and "
                "only one of them can use the port: leave it out"
            )
        require_other_port(port, config.run.bind)
    if not roles or "coordinator" in roles:
        require_installed(config.logging.backends)
    _require_cores(config, roles, num_cores())
    is_torch = config.train.engine == "torch" and (not roles or "trainer" in roles)
    name = config.train.optim.name
    if is_torch and name == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"train.optim.name = {name!r}: torchao is not installed; install it with scripts/setup "
            "adamw8bit"
        )


def _require_cores(config: Config, roles: Sequence[Role], cores: int) -> None:
    """Require cores for an engine and for all ranks, but not for their sum: they may take turns."""
    train, rollout = config.train, config.rollout
    engines = "rollout" in roles if roles else bool(rollout.nodes)
    if rollout.engine != "emulated" and engines and rollout.threads > cores:
        raise ConfigError(
            f"rollout.threads = {rollout.threads}: one engine would have more threads than this "
            f"machine's {cores} cores; lower it"
        )
    trains = train.engine != "emulated" and (not roles or "trainer" in roles)
    if trains and (num := train.ranks * train.threads) > cores:
        key, other = ("threads", "ranks") if train.threads > cores else ("ranks", "threads")
        raise ConfigError(
            f"train.{key} = {getattr(train, key)}: with train.{other} = {getattr(train, other)} "
            f"the ranks would have {num} threads on this machine's {cores} cores; lower it"
        )


def require_new(config: Config) -> None:
    """Raise ConfigError if the name or a port of the run is taken."""
    if not is_new(config.run_dir):
        is_run = (config.run_dir / CONFIG_FILE).exists()
        resume = f"resume it with `lightrl resume {config.run_dir}`, " * is_run
        raise ConfigError(
            f"run directory {config.run_dir} exists; {resume}choose another run.name or remove it"
        )
    checkpoints = config.checkpoints(config.run_dir.resolve())
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise ConfigError(
            f"checkpoint.dir = {config.checkpoint.dir}: {checkpoints} has checkpoints of another "
            "run; choose another run.name or remove them"
        )
    latest = config.run_dir.parent / "latest"
    if os.path.lexists(latest) and not latest.is_symlink():
        raise ConfigError(
            f"run.dir = {config.run.dir}: {latest} exists but is not a link to a run: move it"
        )
    require_free(config.run.bind)
    require_weights_port(config.node.weights_port, config.run.bind)


def _require_small_groups(config: Config) -> None:
    """Raise ConfigError if a group does not fit into one message, or one entry of the journal."""
    size, length = config.rollout.group_size, config.rollout.max_response_length
    most = MAX_FRAME_BYTES // BYTES_OF_TOKEN - (1 << 20)  # reserve for prompt and names
    if size * length > most:
        raise ConfigError(
            f"rollout.group_size = {size} x rollout.max_response_length = {length}: a group of "
            f"{size * length:,} tokens; at most {most:,} fit into one message"
        )


def _require_place(key: str, path: str) -> None:
    """Raise ConfigError if the directory `path` cannot be created."""
    place = Path(path).absolute()
    while not os.path.lexists(place):
        place = place.parent
    why = "" if place.is_dir() else "is not a directory"
    if not os.access(place, os.W_OK | os.X_OK):
        why = why or "cannot be written to"
    if why:
        raise ConfigError(f"{key} = {path!r}: cannot be created: {place} {why}")


def _require_model(config: Config) -> None:
    path = config.model.path
    folder = Path(path)
    if HUB_ID.fullmatch(path) and not folder.exists():
        found = _require_on_hub(path)
        if found is None:  # the daemon that downloads the model checks it
            return
        folder = found
    else:
        of_checkpoint = Path(config.eval.checkpoint, MODEL) if config.eval.checkpoint else None
        _require_directory(path, folder, has_weights=folder != of_checkpoint)
    require_no_code(path, folder)
    require_trainable(path, folder)
    require_dtypes(path, folder)
    stored = (folder / "config.json").read_bytes()
    require_context({"config.json": stored}, config)
    rollout = config.rollout
    if (rollout.nodes or rollout.engine == "torch") and resolve_engine(rollout.engine) == "torch":
        require_engine(path, folder, str(json.loads(stored).get("model_type")))
    if config.model.lora.rank:
        require_targets(folder, config.model.lora.targets)


def _require_directory(path: str, folder: Path, has_weights: bool) -> None:
    why = ""
    if not folder.is_dir():
        why = "no such directory; set a directory with config.json, or a hub id org/name"
    elif not (folder / "config.json").exists():
        why = "has no config.json, so it is not a Hugging Face model directory"
    if why:
        raise ConfigError(f"model.path = {path}: {why}")
    if has_weights:
        stored_tensors(folder, path)


def _require_on_hub(name: str) -> Path | None:
    """Return the folder of a hub model on this machine, None if it has none. Raises ConfigError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # from the HTTP library, which differs between versions of the client
    http_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        if (folder := folder_here(name)) is not None:
            return folder
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
        return None
    except (http_error, HFValidationError, OSError) as e:
        why = " ".join(str(e).split())[:160]
        raise ConfigError(
            f"model.path = {name}: no such directory, and not available from the hub: {why}"
        ) from None


def _require_data(key: str, one: DataSet, config: Config) -> None:
    try:
        if not one.path.startswith(VERIFIERS):  # checked when the environment's data is read
            require_there(one)
    except DataError as e:
        raise ConfigError(f"{key} = {e}") from None
    _require_functions(f"{key.removesuffix('path')}reward", one.reward, config)


def _require_environment(config: Config) -> None:
    """Require what the environment node that starts here needs."""
    environment = config.environment
    if not environment.enabled or not environment.workers:
        return
    programs = {"environment.command": environment.command}
    programs |= {f"environment.mcp[{k}].command": s.command for k, s in enumerate(environment.mcp)}
    for key, command in programs.items():
        if command and shutil.which(command[0]) is None:
            raise ConfigError(f"{key} = {command[0]!r}: no such program on this machine")
    for key, references in (
        ("environment.source", (environment.source,)),
        ("environment.tools", environment.tools),
    ):
        for reference in references:
            file, colon, name = reference.rpartition(":")
            if colon and file.endswith(".py"):
                _require_function(key, Path(file.rpartition(":")[2]), name)


def _require_functions(key: str, functions: Sequence[str], config: Config) -> None:
    if config.reward.source == "kept" and (config.run_dir / FOLDER).is_dir():
        return  # a resumed run has a copy of the functions
    for function in functions:
        file, colon, name = function.rpartition(":")
        if colon and file.endswith(".py"):
            _require_function(key, Path(file), name)


def _require_function(key: str, file: Path, name: str) -> None:
    if not file.is_file():
        raise ConfigError(f"{key} = {file}:{name}: no such file {file.name}")
    try:
        source = file.read_bytes()
        tree = ast.parse(source, filename=str(file))
    except SyntaxError as e:
        raise ConfigError(f"{key}: {file}:{e.lineno}: {e.msg}") from None
    except OSError as e:
        raise ConfigError(f"{key} = {file}:{name}: cannot be read: {e.strerror}") from None
    # The worker looks up a name that the file mentions or may import.
    if not re.search(rf"\b{re.escape(name)}\b|import \*".encode(), source):
        what, kinds = "function", (ast.FunctionDef, ast.AsyncFunctionDef)
        if key == "environment.source":
            what, kinds = "class", (ast.ClassDef,)
        defined = ", ".join(sorted(node.name for node in tree.body if isinstance(node, kinds)))
        there = f"has no {what} {name}; it defines {defined or 'none'}"
        raise ConfigError(f"{key} = {file}:{name}: {there}")
