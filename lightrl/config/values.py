"""Checks and forms of a single value of the config, of whichever key.

Validators raise ValueError with a whole line.
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
TASKS = "tasks:"  # before the span of rows that are made, as in tasks:0-999


def without_compression(path: str) -> PurePath:
    """Example: "a/train.jsonl" of "a/train.jsonl.gz"."""
    return PurePath(re.sub(r"\.(gz|zst)$", "", path, flags=re.IGNORECASE))


def is_data_file(path: str) -> bool:
    """Return whether the name is that of a file of rows, compressed or not."""
    return data_suffix(path) in DATA_SUFFIXES


def data_suffix(path: str) -> str:
    """Example: ".csv" of "A.CSV.gz"."""
    return without_compression(path).suffix.lower()


def expanded(path: str, folder: Path = Path()) -> str:
    """Expand `~`, `~user`, `$NAME` and `${NAME}` as a shell does, unless `folder` has a file of
    that name. Raises ConfigError for an unknown user or variable."""
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
    """Accept a bare string for a list of them."""
    return (value,) if isinstance(value, str) else value


def one_or_several(value: Any) -> Any:
    """Accept a bare integer for a list of them."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def shortened(value: object) -> str:
    """Return the form of a value in an error."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values; an empty table is a value."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def not_greedy(value: Any) -> Any:
    if value == 0:
        raise ValueError(
            "rollout.temperature = 0: greedy ones of a prompt's responses are all the same; raise "
            "it (1 is usual, eval.temperature may be 0)"
        )
    return value


def eta_or_pair(value: Any) -> Any:
    pair = _numbers(value)
    numbers = pair if len(pair) == 2 else _numbers([value])
    if not numbers or not all(1 <= n <= MAX_ETA for n in numbers):
        raise ValueError(
            f"round.eta = {shortened(value)}: expected a number from 1 to {MAX_ETA:g}, or a pair "
            "[prompts, responses] of them"
        )
    return value


def weight_bounds(value: Any) -> Any:
    bounds: Any = value
    if _numbers([value]):
        bounds = [0, value] if value else "off"
    if bounds in (None, "off"):
        return bounds
    numbers = _numbers(bounds)
    if len(numbers) != 2 or not 0 <= numbers[0] <= 1 <= numbers[1] < math.inf:
        raise ValueError(
            f"algorithm.tis_bounds = {shortened(value)}: expected [low, high] with 0 <= low <= 1 "
            '<= high, or "off"'
        )
    return bounds


def _numbers(value: object) -> list[float]:
    """Return a list of numbers; [] for anything else."""
    values = [*cast("list[Any]", value)] if isinstance(value, list | tuple) else list[Any]()
    is_one = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return values if is_one else []


def not_plain(value: Any) -> str | None:
    """Return why JSON and TOML cannot represent a value; None if they can."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        return next((p for v in cast("list[Any]", value) if (p := not_plain(v))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} cannot be sent to nodes"
    if not isinstance(value, str | int | float):
        kind = type(value).__name__
        return f"{shortened(value)} has the type {kind}, which cannot be sent to nodes"
    return None
