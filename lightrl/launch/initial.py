"""`lightrl up --from RUN|CHECKPOINT`: which checkpoint of another run one begins with, and whether
it fits.

Reads small files alone: the trainer verifies the checksums when it loads the checkpoint
(trainer/checkpoint/initial.py). Must not import torch.
"""

from collections.abc import Iterator
from datetime import date
from pathlib import Path

from lightrl.client.address import relative, run_folder
from lightrl.config.schema import Config
from lightrl.data.template import DATE
from lightrl.errors import ConfigError, ProtocolError
from lightrl.launch.eval_target import Adapters, read_table, saved_adapters
from lightrl.launch.folder import CONFIG_FILE
from lightrl.model_files import folder_here, is_target
from lightrl.trainer.checkpoint.saved import (
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
# Of config.json: what the shapes of tensors, or what is computed with them, depend on.
SHAPES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "n_embd", "n_layer", "n_head"),
    *("num_experts", "num_local_experts", "moe_intermediate_size", "n_routed_experts"),
)


def begun_from(config: Config, target: str) -> Config:
    """As `--from TARGET` has it: the name or directory of a run, or a directory of one checkpoint.

    Raises ConfigError.
    """
    folder = run_folder(target) or run_folder(target, Path(config.run.dir))
    if folder is None:
        raise ConfigError(f"--from {target}: no such run or checkpoint{those_beside(Path(target))}")
    return _with(config, folder.resolve())


def settled(config: Config) -> Config:
    """With today as `data.date` where the chat template writes the date, and the newest checkpoint
    in place of a run to begin from. Raises ConfigError, one line, if there is none, or if it is not
    one of this model and optimizer."""
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
        raise ConfigError(
            f"{KEY} = {folder}: {e.filename or folder} cannot be read: {e.strerror}"
        ) from None
    return _with(config, checkpoint)


def _writes_date(model_path: str) -> bool:
    """Of a model that is here."""
    folder = folder_here(model_path)
    files = [folder / name for name in TEMPLATE_FILES] if folder is not None else []
    return any(DATE.encode() in file.read_bytes() for file in files if file.is_file())


def begins_with(config: Config) -> Iterator[str]:
    """What that means, in lines, of a config that is settled; none where the model is."""
    if not config.checkpoint.initial_load_path:
        return
    checkpoint = Path(config.checkpoint.initial_load_path)
    saved = _read(checkpoint)
    state = "weights and optimizer's state" if saved.has_optimizer else "weights"
    before = saved.steps_before + saved.step
    yield f"{relative(checkpoint)}: its {state}; steps, data and seed are this run's own"
    yield f"the learning rate goes on after {before:,} steps, of {before + config.train.steps:,}"
    if config.algorithm.kl_coef > 0:
        yield "algorithm.kl_coef holds it to model.path, not to the checkpoint"


def _with(config: Config, folder: Path) -> Config:
    update = {"initial_load_path": str(folder)}
    section = config.checkpoint.model_copy(update=update)
    return config.model_copy(update={"checkpoint": section})


def _newest(folder: Path) -> Path:
    """The checkpoint itself, or the newest complete one of a run. Raises ConfigError, OSError."""
    if (newest := newest_in(folder)) is not None:
        return newest
    if not folder.is_dir():
        why = "no such directory on this machine"
    elif (folder / CONFIG_FILE).is_file():
        why = "this run has no complete checkpoint yet"
    else:
        why = "is neither a run nor a complete checkpoint"
    raise ConfigError(f"{KEY} = {folder}: {why}")


def _read(checkpoint: Path) -> SavedStep:
    """Raises ConfigError, OSError."""
    try:
        return read_step(checkpoint)
    except ProtocolError:
        raise ConfigError(f"{KEY} = {checkpoint}: {STEP_FILE}: damaged") from None


def _require_fit(config: Config, checkpoint: Path) -> None:
    """Raises ConfigError, OSError."""
    saved, what = _read(checkpoint), f"the checkpoint {relative(checkpoint)}"
    has_model = (checkpoint / LAYOUT_FILE).is_file()
    if has_model != (config.train.engine == "torch"):
        how = "of a model" if has_model else f"of no model: it has no {LAYOUT_FILE}"
        raise ConfigError(f"{config.key_value('train.engine')}: {what} is {how}")
    if not has_model:
        return
    export = f"lightrl export {relative(checkpoint)} OUT"  # which makes a model of it
    adapters, rank = saved_adapters(checkpoint), config.key_value("model.lora.rank")
    if adapters is None and config.model.lora.rank:
        raise ConfigError(
            f"{rank}: {what} has no adapters; to put some beside its model: {export}, and "
            "model.path = OUT"
        )
    if adapters is not None and not config.model.lora.rank:
        raise ConfigError(
            f"{rank}: {what} has adapters of rank {adapters.rank}; to train the whole model: "
            f"{export} --merge, and model.path = OUT"
        )
    if adapters is not None:
        _require_same(config, adapters, what)
    _require_shapes(config.model.path, checkpoint, what)
    if saved.has_optimizer and saved.optimizer not in {"", config.train.optim.name}:
        raise ConfigError(
            f"{config.key_value('train.optim.name')}: {what} has the state of {saved.optimizer!r}, "
            f"which cannot become that; to begin without it: {export}, and model.path = OUT"
        )


def _require_same(config: Config, adapters: Adapters, what: str) -> None:
    """Raises ConfigError."""
    lora = config.model.lora
    for key in ("rank", "alpha"):
        if (value := getattr(adapters, key)) != getattr(lora, key):
            raise ConfigError(f"{config.key_value(f'model.lora.{key}')}: in {what} it is {value:g}")
    targets = lora.targets
    if targets and not all(any(is_target(n, t) for t in targets) for n in adapters.targets):
        leaves = sorted({name.rpartition(".")[2] for name in adapters.targets})
        raise ConfigError(
            f"{config.key_value('model.lora.targets')}: in {what} these have adapters: "
            f"{', '.join(leaves)}"
        )


def _require_shapes(model_path: str, checkpoint: Path, what: str) -> None:
    """Raises ConfigError, OSError. What is not here yet, ranks compare when they load it."""
    folder = folder_here(model_path)
    if folder is None or not (checkpoint / MODEL / "config.json").is_file():
        return
    then, now = (read_table(f / "config.json") for f in (checkpoint / MODEL, folder))
    for key in SHAPES:
        if then.get(key) != now.get(key):
            raise ConfigError(
                f"model.path = {model_path}: its {key} is {now.get(key)}, and {then.get(key)} in "
                f"{what}: both must be of the same model"
            )
