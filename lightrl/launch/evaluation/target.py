"""The CHECKPOINT of `lightrl eval`: a checkpoint of LightRL, a run (its newest one), LoRA adapters
or a Hugging Face model.

Reads small files, no weights. Must not import torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from lightrl.client.address import relative, run_folder
from lightrl.config.run_file import CONFIG_FILE
from lightrl.config.sections import Dtype
from lightrl.errors import ConfigError, ProtocolError
from lightrl.model_files import ADAPTER_CONFIG, HUB_ID
from lightrl.trainer.checkpoint.on_disk import (
    CHECKPOINTS,
    LAYOUT_FILE,
    MODEL,
    STEP_FILE,
    newest_in,
    read_step,
    those_beside,
)

# Of peft: adapters with one of these are no plain LoRA.
OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
WHAT = "RUN/checkpoints/step_N, a run's name or directory, a model directory, or a hub id"


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters with the fields of `model.lora`. `base`: the model in their file, if any."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """The weights to evaluate. Example: EvalTarget("/home/me/runs/a/checkpoints/step_40", 40)"""

    # an absolute directory, or a hub id
    path: str
    # steps done in it
    step: int = 0
    # the place of its config and tokenizer; "" = model.path of the config
    model: str = ""
    # in which its run served the weights; "" = not known
    dtype: str = ""
    adapters: Adapters | None = None
    # of its run, if there is one
    config: Path | None = None


def find_target(text: str) -> EvalTarget:
    """Raises ConfigError, one line, if there is nothing to evaluate."""
    try:
        if (folder := run_folder(text)) is not None:
            return _of_folder(text, folder)
        given = Path(text)
        is_path = given.exists() or (given.parent.is_dir() and given.parent != Path())
    except OSError as e:
        raise ConfigError(f"{text}: {e.strerror}") from None
    if is_path or not HUB_ID.fullmatch(text):
        others = those_beside(given) or those_beside(Path("runs", text))
        raise ConfigError(f"{text}: no such checkpoint{others or f'; give {WHAT}'}")
    return EvalTarget(text, model=text)


def _of_folder(text: str, folder: Path) -> EvalTarget:
    path = str(folder.absolute())
    if (file := folder / ADAPTER_CONFIG).is_file():
        return EvalTarget(path, adapters=_adapters(file, read_table(file)))
    if (folder / "config.json").is_file():
        return EvalTarget(path, model=path)
    if (checkpoint := newest_in(folder)) is not None:
        return _of_checkpoint(checkpoint.absolute())
    if (folder / CONFIG_FILE).is_file() or (folder / CHECKPOINTS).is_dir():
        raise ConfigError(f"{text}: this run has no checkpoint yet")
    files = f"no checkpoint ({STEP_FILE}), no adapters ({ADAPTER_CONFIG}), no model (config.json)"
    raise ConfigError(f"{text}: holds {files}")


def _of_checkpoint(folder: Path) -> EvalTarget:
    try:
        saved = read_step(folder)
    except (OSError, ProtocolError) as e:
        raise ConfigError(f"{relative(folder)}: is no complete checkpoint: {e}") from None
    config = folder.parent.parent / CONFIG_FILE
    adapters = saved_adapters(folder)
    return EvalTarget(
        str(folder),
        saved.step,
        model=str(folder / MODEL) if (folder / MODEL).is_dir() and adapters is None else "",
        dtype=saved.dtype if saved.dtype in get_args(Dtype) else "",
        adapters=adapters,
        config=config if config.is_file() else None,
    )


def saved_adapters(checkpoint: Path) -> Adapters | None:
    """Return the adapters of a checkpoint of LightRL, if it has some. Raises ConfigError."""
    layout = checkpoint / LAYOUT_FILE
    text = read_table(layout).get("adapter") if layout.is_file() else None
    return _adapters(layout, read_table(layout, str(text))) if text else None


def _adapters(file: Path, table: dict[str, Any]) -> Adapters:
    """Raises ConfigError for adapters that are no plain LoRA."""
    others = [f"{key} = {table[key]!r}" for key in OTHER_KINDS if table.get(key)]
    targets = table.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        others.append(f"target_modules = {targets!r}, a pattern")
    if (kind := table.get("peft_type")) != "LORA":
        others.append(f"peft_type = {kind!r}")
    if others:
        raise ConfigError(f"{relative(file)}: {others[0]}: only plain LoRA adapters are evaluated")
    named = cast("list[str]", targets) if isinstance(targets, list) else []
    try:
        rank, alpha = int(table["r"]), float(table["lora_alpha"])
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{relative(file)}: has no valid r or lora_alpha: {e}") from None
    return Adapters(rank, alpha, tuple(named), str(table.get("base_model_name_or_path") or ""))


def read_table(file: Path, text: str | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or in a `text` of it. Raises ConfigError."""
    try:
        table: Any = json.loads(file.read_bytes() if text is None else text)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{relative(file)}: cannot be read: {e}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{relative(file)}: is not a JSON object")
    return cast("dict[str, Any]", table)
