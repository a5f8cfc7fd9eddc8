"""Values that are settled before a run starts: the checkpoint that it begins with (`lightrl up
--from RUN|CHECKPOINT`), which must fit, and the date of chat templates.

Reads small files alone: the trainer verifies the checksums (trainer/checkpoint/initial.py). Must
not import torch.
"""

from collections.abc import Iterator
from datetime import date
from pathlib import Path

from lightrl.client.address import relative, run_folder
from lightrl.config.run_file import CONFIG_FILE
from lightrl.config.schema import Config
from lightrl.data.template import DATE
from lightrl.errors import ConfigError, ProtocolError
from lightrl.launch.evaluation.target import Adapters, read_table, saved_adapters
from lightrl.model_files import folder_here, is_target
from lightrl.trainer.checkpoint.on_disk import (
    LAYOUT_FILE,
    MODEL,
    STEP_FILE,
    SavedStep,
    newest_in,
    read_step,
    those_beside,
)

KEY = "checkpoint.initial_load_path"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# Of config.json: they determine the shapes of tensors, or what is computed with them.
SHAPES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "n_embd", "n_layer", "n_head"),
    *("num_experts", "num_local_experts", "moe_intermediate_size", "n_routed_experts"),
)


def begun_from(config: Config, target: str) -> Config:
    """Return the config with `--from TARGET`: a run's name or directory, or a checkpoint. Raises
    ConfigError."""
    folder = run_folder(target) or run_folder(target, Path(config.run.dir))
    if folder is None:
        raise ConfigError(f"--from {target}: no such run or checkpoint{those_beside(Path(target))}")
    return _with(config, folder.resolve())


def settled(config: Config) -> Config:
    """Return the config with today as `data.date` where the chat template writes the date, and the
    newest checkpoint of a run that it begins with. Raises ConfigError, one line, if there is none
    or it does not fit."""
    if config.data.date is None and _writes_date(config.model.path):
        data = config.data.model_copy(update={"date": date.today()})
        config = config.model_copy(update={"data": data})
    if not config.checkpoint.initial_load_path:
        return config
    folder = Path(config.checkpoint.initial_load_path)
    try:
        checkpoint = _newest(folder).resolve()
        _require_fit(config, checkpoint)
    except OSError as e:
        where = e.filename or folder
        raise ConfigError(f"{KEY} = {folder}: {where} cannot be read: {e.strerror}") from None
    return _with(config, checkpoint)


def _writes_date(model_path: str) -> bool:
    folder = folder_here(model_path)
    files = [folder / name for name in TEMPLATE_FILES] if folder is not None else []
    return any(DATE.encode() in file.read_bytes() for file in files if file.is_file())


def begins_with(config: Config) -> Iterator[str]:
    """Yield lines on the checkpoint that a settled config begins with, if any."""
    if not config.checkpoint.initial_load_path:
        return
    checkpoint = Path(config.checkpoint.initial_load_path)
    saved = _read(checkpoint)
    state = "weights and optimizer's state" if saved.has_optimizer else "weights"
    before = saved.steps_before + saved.step
    yield f"{relative(checkpoint)}: its {state}; steps, data and seed are this run's own"
    yield f"the schedule continues after {before:,} steps, of {before + config.train.steps:,}"
    if config.algorithm.kl_coef > 0:
        yield "algorithm.kl_coef compares with model.path, not with the checkpoint"


def _with(config: Config, folder: Path) -> Config:
    section = config.checkpoint.model_copy(update={"initial_load_path": str(folder)})
    return config.model_copy(update={"checkpoint": section})


def _newest(folder: Path) -> Path:
    """Return the checkpoint itself, or the newest one of a run. Raises ConfigError, OSError."""
    if (newest := newest_in(folder)) is not None:
        return newest
    why = "is neither a run nor a complete checkpoint"
    if not folder.is_dir():
        why = "no such directory on this machine"
    elif (folder / CONFIG_FILE).is_file():
        why = "this run has no complete checkpoint yet"
    raise ConfigError(f"{KEY} = {folder}: {why}")


def _read(checkpoint: Path) -> SavedStep:
    try:
        return read_step(checkpoint)
    except ProtocolError:
        raise ConfigError(f"{KEY} = {checkpoint}: {STEP_FILE}: damaged") from None


def _require_fit(config: Config, checkpoint: Path) -> None:
    """Raise ConfigError or OSError if the config cannot continue from this checkpoint."""
    for key, why in _misfits(config, _read(checkpoint), checkpoint):
        where = f"the checkpoint {relative(checkpoint)}"
        raise ConfigError(f"{config.key_value(key)}: {where} {why}")


def _misfits(config: Config, saved: SavedStep, checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Yield a key and how the checkpoint differs from it."""
    has_model = (checkpoint / LAYOUT_FILE).is_file()
    if has_model != (config.train.engine == "torch"):
        how = "of a model" if has_model else f"of no model: it has no {LAYOUT_FILE}"
        yield "train.engine", f"is {how}"
    if not has_model:
        return
    export = f"lightrl export {relative(checkpoint)} OUT"
    adapters, lora = saved_adapters(checkpoint), config.model.lora
    if adapters is None and lora.rank:
        yield "model.lora.rank", f"has no adapters; to add some: {export}, and model.path = OUT"
    if adapters is not None and not lora.rank:
        merge = f"{export} --merge, and model.path = OUT"
        rank = adapters.rank
        yield "model.lora.rank", f"has adapters of rank {rank}; to train the whole model: {merge}"
    if adapters is not None:
        yield from _other_adapters(config, adapters)
    yield from _other_shapes(config.model.path, checkpoint)
    if saved.has_optimizer and saved.optimizer not in {"", config.train.optim.name}:
        without = f"to begin without it: {export}, and model.path = OUT"
        yield "train.optim.name", f"has the state of {saved.optimizer!r}; {without}"


def _other_adapters(config: Config, adapters: Adapters) -> Iterator[tuple[str, str]]:
    lora = config.model.lora
    for key in ("rank", "alpha"):
        if (value := getattr(adapters, key)) != getattr(lora, key):
            yield f"model.lora.{key}", f"has {value:g}"
    targets = lora.targets
    if targets and not all(any(is_target(n, t) for t in targets) for n in adapters.targets):
        leaves = sorted({name.rpartition(".")[2] for name in adapters.targets})
        yield "model.lora.targets", f"has adapters of {', '.join(leaves)}"


def _other_shapes(model_path: str, checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Compare with the model, if it is on this machine. Raises ConfigError, OSError."""
    folder = folder_here(model_path)
    if folder is None or not (checkpoint / MODEL / "config.json").is_file():
        return
    then, now = (read_table(f / "config.json") for f in (checkpoint / MODEL, folder))
    for key in SHAPES:
        if then.get(key) != now.get(key):
            yield "model.path", f"has {key} {then.get(key)}, and the model {now.get(key)}"
