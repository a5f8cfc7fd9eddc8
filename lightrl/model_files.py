"""A model directory or hub id: its tokenizer, the small files that travel, and where its weights
are.

Every problem is one line that names model.path. Must not import transformers or huggingface_hub
before they are needed: daemons import this module.
"""

import json
import re
from pathlib import Path
from typing import Any

from lightrl.errors import first_line
from lightrl.tokenizer import plain_tokenizer
from lightrl.weight_files import WEIGHTS_INDEX, refused, weight_files

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "*.model",
)
MAX_MODEL_FILE_BYTES = 32 << 20  # they travel to every node in one message
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of peft

CAUSAL = ("ForCausalLM", "LMHeadModel")  # how such classes are called

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_target(layer: str, target: str) -> bool:
    """Whether one of model.lora.targets is the name of this layer, or its end."""
    return layer == target or layer.endswith(f".{target}")


def folder_here(model_path: str) -> Path | None:
    """The directory itself, or for a hub id its copy on this machine, if there is one."""
    if (folder := Path(model_path)).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a model directory or hub id. Raises ConfigError, one line, naming
    model.path."""
    folder = _model_folder(model_path)
    require_no_code(model_path, folder)
    require_trainable(model_path, folder)
    if not any(
        (folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    ):
        raise refused(model_path, "has no tokenizer.json or tokenizer_config.json")
    try:
        if (folder / "tokenizer.json").is_file():
            if (plain := plain_tokenizer(folder)) is not None:
                return plain
            # It is complete in itself; AutoTokenizer would load torch.
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
        return Tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # the tokenizers library raises plain Exception for a broken file
        raise refused(model_path, f"its tokenizer cannot be loaded: {first_line(e)}") from e


def require_no_code(model_path: str, folder: Path) -> None:
    """Raises ConfigError if the model is of a kind that only code in its own directory defines.

    A directory may hold code for a kind that transformers has, too: then that of transformers is
    used.
    """
    table = _read_json(model_path, folder / "config.json")
    if not isinstance(table.get("auto_map"), dict):
        return
    from transformers import CONFIG_MAPPING

    if (kind := str(table.get("model_type"))) not in CONFIG_MAPPING:
        raise refused(
            model_path,
            f"its model_type {kind!r} is defined by Python code in "
            "the directory (auto_map), which LightRL does not run; use a model that transformers "
            "itself knows",
        )


def require_trainable(model_path: str, folder: Path) -> None:
    """Raises ConfigError if the model is quantised, reads more than text, does not write text from
    left to right, or is the base of an adapter that lies beside it."""
    table = _read_json(model_path, folder / "config.json")
    architectures = table.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    why = ""
    if table.get("quantization_config"):
        why = (
            "is quantised (quantization_config in its config.json); use the model it was made from"
        )
    elif modes := [key for key in ("vision_config", "audio_config") if table.get(key)]:
        why = f"is multimodal ({modes[0]} in its config.json); LightRL trains language models"
    elif table.get("is_encoder_decoder"):
        why = "has an encoder (is_encoder_decoder in its config.json); LightRL trains decoders"
    elif named and not any(str(name).endswith(CAUSAL) for name in named):
        why = f"is a {named[0]}, not a causal language model"
    elif (folder / ADAPTER_CONFIG).is_file():
        why = (
            f"has an adapter beside it ({ADAPTER_CONFIG}), which transformers would apply and "
            "LightRL does not: merge it into the model, or remove that file"
        )
    if why:
        raise refused(model_path, f"{why}")


def _read_json(model_path: str, file: Path) -> dict[str, Any]:
    """Empty if there is no such file. Raises ConfigError."""
    try:
        table = json.loads(_read(model_path, file))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as e:
        raise refused(model_path, f"{file.name} is not JSON: {first_line(e)}") from None
    if not isinstance(table, dict):
        raise refused(model_path, f"{file.name} is not a JSON object")
    return table


def _read(model_path: str, file: Path) -> bytes:
    """Raises FileNotFoundError, and ConfigError for what keeps a file that is there from being
    read."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as e:
        why = e.strerror or first_line(e)
        raise refused(model_path, f"{file.name} cannot be read: {why}") from None


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a response: those of generation_config.json, config.json and the
    tokenizer."""
    folder = _model_folder(model_path)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        table = _read_json(model_path, folder / name)
        for section in (table, table.get("text_config") or {}):
            value = section.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def model_files(model_path: str) -> dict[str, bytes]:
    """Name -> content of the small files an engine and a reward worker need; no weights.

    Raises ConfigError if there is no config.json or a file is too large to be sent.
    """
    folder = _model_folder(model_path)
    files = sorted({f for pattern in MODEL_FILES for f in folder.glob(pattern) if f.is_file()})
    if not (folder / "config.json").is_file():
        raise refused(model_path, "has no config.json")
    for f in files:
        if (size := f.stat().st_size) > MAX_MODEL_FILE_BYTES:
            raise refused(
                model_path,
                f"{f.name} has {size >> 20} MiB; "
                f"at most {MAX_MODEL_FILE_BYTES >> 20} MiB can be sent to nodes",
            )
    return {f.name: _read(model_path, f) for f in files}


def weights_folder(model_path: str) -> Path:
    """The directory itself, or for a hub id its local copy with the weights, which may be
    downloaded now.

    Raises ConfigError, one line, if it does not hold all its weights as safetensors.
    """
    folder = _model_folder(model_path, ("*.safetensors", WEIGHTS_INDEX, ADAPTER_CONFIG))
    weight_files(folder, model_path)
    require_trainable(model_path, folder)
    return folder


def _model_folder(model_path: str, further_files: tuple[str, ...] = ()) -> Path:
    """The directory itself, or for a hub id the local copy of its small files and
    `further_files`."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if folder.exists() or not HUB_ID.fullmatch(model_path):
        raise refused(model_path, "no such directory, and not a hub id (org/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model_path,
                allow_patterns=[*MODEL_FILES, *further_files],
                # "*" matches "/" too: folders hold other formats, "consolidated" the same weights
                # once more.
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except Exception as e:  # the errors of the hub's HTTP library have no base that we could name
        raise refused(model_path, f"no such directory, and the hub says: {first_line(e)}") from e
