"""What a single value of the config may be, whichever key it belongs to: how it may be written, how
it is shown, whether it can travel.

Owns no key. Raises ValueError with a line that schema.py passes on.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, cast

from lightrl.errors import ConfigError

MAX_ETA = 4.0
DATA_SUFFIXES = (".jsonl", ".parquet", ".csv", ".tsv", ".json")
VERIFIERS = "verifiers:"  # before the name of an environment, which brings data and rewards


def without_compression(path: str) -> PurePath:
    """Example: "a/train.jsonl" of "a/train.jsonl.gz"."""
    return PurePath(re.sub(r"\.(gz|zst)$", "", path, flags=re.IGNORECASE))


def is_data_file(path: str) -> bool:
    """Whether its name is that of a file of rows, compressed or not."""
    return data_suffix(path) in DATA_SUFFIXES


def data_suffix(path: str) -> str:
    """In small letters, without that of a compression. Example: ".csv" of "A.CSV.gz"."""
    return without_compression(path).suffix.lower()


def expanded(path: str, folder: Path = Path()) -> str:
    """With the home directory for `~` and `~user`, and variables of the environment for `$NAME` and
    `${NAME}`, as a shell has them; a file in `folder` that is called so is itself.

    Raises ConfigError for a user or a variable that there is not.
    """
    if not (path.startswith("~") or "$" in path) or os.path.exists(folder / path):
        return path
    for name in re.findall(r"\$\{?([A-Za-z_]\w*)", path):
        if name not in os.environ:
            raise ConfigError(f"{shortened(path)}: there is no variable {name} in the environment")
    full = os.path.expanduser(os.path.expandvars(path))
    if full.startswith("~"):
        raise ConfigError(f"{shortened(path)}: {full.partition('/')[0]} is not a user here")
    return full


def one_or_many(value: Any) -> Any:
    """A bare string where a list of them is possible."""
    return (value,) if isinstance(value, str) else value


def shortened(value: object) -> str:
    """As it is shown in an error."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def one_or_several(value: Any) -> Any:
    """A bare number where several are possible."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, as on the command line, and their values; an empty table is one."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def not_greedy(value: Any) -> Any:
    if value == 0:
        raise ValueError(
            "rollout.temperature = 0: responses that are trained are sampled, and greedy ones to a "
            "prompt are all the same; raise it (1 is usual, eval.temperature may be 0)"
        )
    return value


def eta_or_pair(value: Any) -> Any:
    if not _is_eta(value) and not _is_pair(value):
        raise ValueError(
            f"round.eta = {shortened(value)}: expected a number from 1 to {MAX_ETA:g}, or a pair "
            "of such numbers [prompts, responses]"
        )
    return value


def weight_bounds(value: Any) -> Any:
    bounds: Any = value
    if isinstance(value, int | float) and not isinstance(value, bool):
        bounds = [0, value] if value else "off"
    if bounds not in (None, "off") and not _are_bounds(bounds):
        raise ValueError(
            f"algorithm.tis_bounds = {shortened(value)}: expected [low, high] with 0 <= low <= 1 "
            '<= high, since 1 is the weight of a token of the policy itself, or "off"'
        )
    return bounds


def _are_bounds(value: Any) -> bool:
    values = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    are_two = len(values) == 2 and all(isinstance(v, int | float) for v in values)
    return are_two and 0 <= values[0] <= 1 <= values[1] < math.inf


def _is_eta(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MAX_ETA


def _is_pair(value: Any) -> bool:
    values = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    return len(values) == 2 and all(map(_is_eta, values))


def not_plain(value: Any) -> str | None:
    """Why a value of engine_args would not come back the same from JSON and TOML."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        return next((p for v in cast("list[Any]", value) if (p := not_plain(v))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} cannot be sent to nodes"
    if not isinstance(value, str | int | float):
        return (
            f"{shortened(value)} has the type {type(value).__name__}, which cannot be sent to nodes"
        )
    return None
