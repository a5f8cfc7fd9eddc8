"""Which files of a model directory hold its weights, and what their headers contain.

Follows the rule of transformers: the shards that model.safetensors.index.json names, else
model.safetensors. No other file is read: shards of an earlier save or averaged weights may lie
beside them. Reads headers only; must not import torch.
"""

import json
from pathlib import Path
from typing import Any, cast

from lightrl.errors import ConfigError

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path, named: str = "") -> list[Path]:
    """The safetensors files of the model in `folder`, in the order of their names.

    Raises ConfigError, one line that begins with `model.path = named`, if they are not all there or
    if two sets of weights lie there.
    """
    return sorted({folder / file for file in _index(folder, named).values()})


def stored_tensors(folder: Path, named: str = "") -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name of each tensor: its file and its entry in the header, `dtype` and `shape`.

    Raises ConfigError as `weight_files`, and if a header cannot be read or a shard lacks a tensor
    that the index places there.
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
    """Of a safetensors file, "dtype" and "shape" of each tensor: 8 bytes of its length, then JSON.

    Raises OSError, ValueError.
    """
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        table: Any = json.loads(data.read(size)) if size <= 100 << 20 else None  # the format's own
    if not isinstance(table, dict) or not all(map(_is_entry, cast("Any", table).values())):
        raise ValueError(f"{file}: no safetensors header")
    entries = cast("dict[str, dict[str, Any]]", table)
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


def _index(folder: Path, named: str) -> dict[str, str]:
    """Tensor -> name of its file; of a single file {"": its name}."""
    single = (folder / WEIGHTS).is_file()
    if not (folder / WEIGHTS_INDEX).is_file():
        if single:
            return {"": WEIGHTS}
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        why = f"has neither {WEIGHTS} nor {WEIGHTS_INDEX}"
        if others:
            why += f", which would tell whether {others[0]} is to be loaded"
        else:
            why += "; load a model of .bin or .pt files with transformers and save_pretrained() it"
        raise refused(named or folder, why)
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
        why = (
            f"holds two sets of weights, {WEIGHTS} and the shards that {WEIGHTS_INDEX} names: "
            "remove one"
        )
        raise refused(named or folder, why)
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        why = f"{len(missing)} shards of {WEIGHTS_INDEX} are missing: {missing[0]}"
        raise refused(named or folder, why)
    return index


def refused(model_path: str | Path, why: str) -> ConfigError:
    return ConfigError(f"model.path = {str(model_path)!r}: {why}")


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(cast("Any", entry).get("shape", []), list)
