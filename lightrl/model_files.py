"""A model directory or hub id: its tokenizer, the small files that are sent to nodes, and which
safetensors files are its weights.

Every problem is one line that names model.path. Reads no weights but their headers. Must not import
torch, and transformers or huggingface_hub only where they are needed.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightrl.errors import ConfigError, first_line

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
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
MAX_MODEL_FILE_BYTES = 32 << 20  # they are sent to every node in one message
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of peft

CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the names of such classes
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SPECIAL_TOKENS = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
# Of a tokenizer_config.json: they change no token of a prompt.
HARMLESS = {"backend", "clean_up_tokenization_spaces", "model_max_length", "tokenizer_class"}
# They may add tokens, or a chat template.
FURTHER_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def is_target(layer: str, target: str) -> bool:
    """Return whether one of model.lora.targets is the name of this layer, or its end."""
    return layer == target or layer.endswith(f".{target}")


def folder_here(model_path: str) -> Path | None:
    """Return the directory, or for a hub id its copy on this machine, if there is one."""
    if (folder := Path(model_path)).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def load_tokenizer(model_path: str) -> Any:
    """Return the tokenizer of a model directory or hub id. Raises ConfigError."""
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
            # AutoTokenizer would load torch.
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
        return Tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # the tokenizers library raises plain Exception for a broken file
        raise refused(model_path, f"its tokenizer cannot be loaded: {first_line(e)}") from e


def require_no_code(model_path: str, folder: Path) -> None:
    """Raise ConfigError if only code in the directory defines this kind of model, which is not used
    where transformers has it too."""
    table = _read_json(model_path, folder / "config.json")
    if not isinstance(table.get("auto_map"), dict):
        return
    from transformers import CONFIG_MAPPING

    if (kind := str(table.get("model_type"))) not in CONFIG_MAPPING:
        code = "is defined by Python code in the directory (auto_map), which LightRL does not run"
        raise refused(model_path, f"its model_type {kind!r} {code}; use one that transformers has")


def require_trainable(model_path: str, folder: Path) -> None:
    """Raise ConfigError if the model is quantised, multimodal, no causal language model, or has an
    adapter beside it."""
    table = _read_json(model_path, folder / "config.json")
    architectures = table.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    why = ""
    if table.get("quantization_config"):
        why = "is quantised (quantization_config in its config.json); use the model before that"
    elif modes := [key for key in ("vision_config", "audio_config") if table.get(key)]:
        why = f"is multimodal ({modes[0]} in its config.json); LightRL trains language models"
    elif table.get("is_encoder_decoder"):
        why = "has an encoder (is_encoder_decoder in its config.json); LightRL trains decoders"
    elif named and not any(str(name).endswith(CAUSAL) for name in named):
        why = f"is a {named[0]}, not a causal language model"
    elif (folder / ADAPTER_CONFIG).is_file():
        ignored = "which LightRL does not apply: merge it into the model, or remove that file"
        why = f"has an adapter beside it ({ADAPTER_CONFIG}), {ignored}"
    if why:
        raise refused(model_path, why)


def _read_json(model_path: str, file: Path) -> dict[str, Any]:
    """Return {} if there is no such file. Raises ConfigError."""
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
    """Raises FileNotFoundError, and ConfigError for a file that cannot be read."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as e:
        why = e.strerror or first_line(e)
        raise refused(model_path, f"{file.name} cannot be read: {why}") from None


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that end a response, by generation_config.json, config.json and the
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


def vocabulary_size(model_path: str) -> int:
    """Return the number of token ids that the model has. Raises ConfigError."""
    table = _read_json(model_path, _model_folder(model_path) / "config.json")
    size = (table.get("text_config") or table).get("vocab_size")
    if not isinstance(size, int):
        raise refused(model_path, "config.json has no vocab_size")
    return size


def model_files(model_path: str) -> dict[str, bytes]:
    """Map names to the contents of the small files that an engine and a reward worker need. Raises
    ConfigError if there is no config.json or a file is too large to be sent."""
    folder = _model_folder(model_path)
    files = sorted({f for pattern in MODEL_FILES for f in folder.glob(pattern) if f.is_file()})
    if not (folder / "config.json").is_file():
        raise refused(model_path, "has no config.json")
    for f in files:
        if (size := f.stat().st_size) > MAX_MODEL_FILE_BYTES:
            most = f"at most {MAX_MODEL_FILE_BYTES >> 20} MiB can be sent to nodes"
            raise refused(model_path, f"{f.name} has {size >> 20} MiB; {most}")
    return {f.name: _read(model_path, f) for f in files}


def weights_folder(model_path: str) -> Path:
    """Return the directory, or the local copy of a hub id, which may be downloaded. Raises
    ConfigError if it does not hold all its weights as safetensors."""
    folder = _model_folder(model_path, ("*.safetensors", WEIGHTS_INDEX, ADAPTER_CONFIG))
    weight_files(folder, model_path)
    require_trainable(model_path, folder)
    return folder


def _model_folder(model_path: str, further_files: tuple[str, ...] = ()) -> Path:
    """Return the directory, or the local copy of a hub id: its small files and `further_files`."""
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
                # other formats, and the same weights once more
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except Exception as e:  # the errors of the hub's HTTP library have no common base
        raise refused(model_path, f"no such directory, and the hub reports: {first_line(e)}") from e


class PlainTokenizer:
    """A tokenizer that its tokenizer.json describes completely, read with `tokenizers` alone: to
    import transformers takes longer than to start a coordinator. It gives the same tokens."""

    chat_template = None

    def __init__(self, tokenizer: "Tokenizer", config: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = self._id_of(config.get("bos_token"))
        self.eos_token_id = self._id_of(config.get("eos_token"))

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        # not `encode`, which holds the GIL: a text of a megabyte takes seconds
        texts = [text] if isinstance(text, str) else text
        ids = [e.ids for e in self._tokenizer.encode_batch_fast(texts, False, add_special_tokens)]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def decode(self, token_ids: list[int]) -> str:
        """Return the text with special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @property
    def added_tokens_decoder(self) -> "dict[int, AddedToken]":
        return self._tokenizer.get_added_tokens_decoder()


def plain_tokenizer(folder: Path) -> PlainTokenizer | None:
    """Return None if files or keys might change its tokens. A broken tokenizer.json raises an error
    of the library."""
    if any((folder / name).exists() for name in FURTHER_FILES):
        return None
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or not config.keys() <= HARMLESS.union(SPECIAL_TOKENS):
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
    named = [token for key in SPECIAL_TOKENS if (token := config.get(key)) is not None]
    if tokenizer.truncation or tokenizer.padding:
        return None
    if not all(isinstance(t, str) and t in added and _is_as_named(added[t]) for t in named):
        return None
    return PlainTokenizer(tokenizer, config)


def _is_as_named(token: "AddedToken") -> bool:
    """Return whether transformers would add the token in the same form by its name alone."""
    return token.special and not (
        token.lstrip or token.rstrip or token.single_word or token.normalized
    )


def weight_files(folder: Path, named: str = "") -> list[Path]:
    """Return the safetensors files of the model in `folder`: the shards of its index, else
    model.safetensors. Other files are ignored.

    Raises ConfigError, a line that begins with `model.path = named`, if some are missing or there
    are two sets of weights.
    """
    return sorted({folder / file for file in _index(folder, named).values()})


def stored_tensors(folder: Path, named: str = "") -> dict[str, tuple[Path, dict[str, Any]]]:
    """Map the name of each tensor to its file and its entry in the header, `dtype` and `shape`.

    Raises ConfigError as `weight_files`, and for a header that cannot be read or lacks a tensor of
    the index.
    """
    index = _index(folder, named)
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in sorted({folder / name for name in index.values()}):
        try:
            entries = header(file)
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else "has no header of safetensors"
            raise refused(named or folder, f"{file.name} cannot be read: {why}") from None
        found |= {
            tensor: (file, entry)
            for tensor, entry in entries.items()
            if index.get(tensor, file.name) == file.name
        }
    missing = [tensor for tensor in index if tensor and tensor not in found]
    if missing:
        why = f"{WEIGHTS_INDEX} places {missing[0]} in {index[missing[0]]}, which does not hold it"
        raise refused(named or folder, why)
    return found


def header(file: Path) -> dict[str, dict[str, Any]]:
    """Return "dtype" and "shape" of each tensor in a safetensors file, whose header is 8 bytes of
    length, then JSON. Raises OSError, ValueError."""
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        table: Any = json.loads(data.read(size)) if size <= 100 << 20 else None  # the format's own
    if not isinstance(table, dict) or not all(map(_is_entry, cast("Any", table).values())):
        raise ValueError(f"{file}: no safetensors header")
    entries = cast("dict[str, dict[str, Any]]", table)
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


def _index(folder: Path, named: str) -> dict[str, str]:
    """Map tensors to the names of their files; {"": its name} if there is one file."""
    single = (folder / WEIGHTS).is_file()
    if not (folder / WEIGHTS_INDEX).is_file():
        if single:
            return {"": WEIGHTS}
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        what = "load a model of .bin or .pt files with transformers and save_pretrained() it"
        if others:
            what = f"without them {others[0]} is not loaded"
        raise refused(named or folder, f"has neither {WEIGHTS} nor {WEIGHTS_INDEX}; {what}")
    try:
        index: Any = json.loads((folder / WEIGHTS_INDEX).read_bytes())["weight_map"]
        if not index or not all(isinstance(file, str) for file in index.values()):
            raise ValueError
    except OSError as e:
        why = f"{WEIGHTS_INDEX} cannot be read: {e.strerror or e}"
        raise refused(named or folder, why) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise refused(named or folder, f"{WEIGHTS_INDEX} is not an index") from None
    files = set(index.values())
    if single and WEIGHTS not in files:
        why = f"holds two sets of weights, {WEIGHTS} and the shards of {WEIGHTS_INDEX}: remove one"
        raise refused(named or folder, why)
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        why = f"{len(missing)} shards of {WEIGHTS_INDEX} are missing: {missing[0]}"
        raise refused(named or folder, why)
    return index


def refused(model_path: str | Path, why: str) -> ConfigError:
    return ConfigError(f"model.path = {str(model_path)!r}: {why}")


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(cast("Any", entry).get("shape", []), list)
