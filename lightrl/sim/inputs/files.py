"""Read workload files. Every mistake in a file raises SimError with a message of one line.

A workload file is JSON with any of these parts, or JSONL with {"prompt": ..., "lengths": [...]} on
each line, or the lengths.jsonl of a run:

    {"base": "generic", "lengths": {"p1": [310, 512]}, "length_model": {...}, "num_prompts": 4096,
     "prompt_tokens": 200, "same_again": 0.5, "reward": {...}, "environment": {...},
     "engine": {...}, "training": {...}, "transfer": {...}, "prices": {...}, "speculation": {...}}

The keys of engine, training, transfer, prices and speculation are the fields in `hardware.py`,
those of length_model, reward and environment the fields in `workload.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError, with_config

from lightrl.errors import SimError
from lightrl.sim.inputs.hardware import STRICT
from lightrl.sim.inputs.scenario import PRESETS, Scenario, generic
from lightrl.sim.inputs.traces import read_text
from lightrl.sim.inputs.workload import (
    SHORT_TAIL,
    EmpiricalLengths,
    LengthModel,
    Share,
    complete_censored,
)

T = TypeVar("T")
Part: TypeAlias = dict[str, Any] | None


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class _File:
    base: str = "generic"
    lengths: dict[str, Annotated[list[PositiveInt], Field(min_length=1)]] | None = None
    length_model: Part = None
    num_prompts: PositiveInt | None = None
    prompt_tokens: PositiveInt | None = None
    same_again: Share | None = None
    reward: Part = None
    environment: Part = None
    engine: Part = None
    training: Part = None
    transfer: Part = None
    prices: Part = None
    speculation: Part = None


def require_known(source: str) -> None:
    """Raise SimError if `source` is neither a preset nor a file; "" = generic."""
    known = ["generic", *PRESETS]
    if source and source not in known and not Path(source).is_file():
        raise SimError(
            f"--workload {source}: is not a file, a run or a preset ({', '.join(known)})"
        )


def find_scenario(source: str, max_response_tokens: int, seed: int) -> Scenario:
    """Return the preset `source` or the scenario in the workload file `source`. Raise SimError."""
    if not source or source == "generic":
        return generic(max_response_tokens)
    if source in PRESETS:
        return PRESETS[source]()
    require_known(source)
    path = Path(source)
    text = read_text(path)
    if path.suffix == ".jsonl":
        return _from_lines(path, text, max_response_tokens, seed)
    try:
        return _from_parts(_parsed(_File, text), path.stem, max_response_tokens, seed)
    except SimError as e:
        raise SimError(f"{path}: {e}") from None


def _from_parts(parts: _File, name: str, limit: int, seed: int) -> Scenario:
    base = find_scenario(parts.base, limit, seed)
    lengths = base.workload.lengths
    changes = {
        key: number
        for key in ("num_prompts", "prompt_tokens", "same_again")
        if (number := getattr(parts, key)) is not None
    }
    if parts.lengths is not None:
        lengths = EmpiricalLengths(_renamed(parts.lengths), seed)
        changes.setdefault("num_prompts", len(parts.lengths))
    if parts.length_model is not None:
        start = base.workload.lengths
        start = start if isinstance(start, LengthModel) else SHORT_TAIL.scaled(limit)
        lengths = _changed(start, parts.length_model, "length_model")
    changes |= {"name": name, "note": "", "lengths": lengths}
    changes |= {
        key: _changed(getattr(base.workload, key), getattr(parts, key), key)
        for key in ("reward", "environment")
    }
    hardware = {
        key: _changed(getattr(base, key), getattr(parts, key), key)
        for key in ("training", "transfer", "prices", "speculation")
    }
    if parts.engine is not None:
        hardware["engines"] = {1: _changed(base.engine, parts.engine, "engine")}
    return replace(base, workload=replace(base.workload, **changes), **hardware)


def _from_lines(path: Path, text: str, limit: int, seed: int) -> Scenario:
    seen: dict[str, list[tuple[int, bool]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = _parsed(_Line, line)
        except SimError as e:
            raise SimError(f"{path}:{number}: {e}") from None
        if row.prompt and row.lengths:
            seen.setdefault(row.prompt, []).extend((tokens, True) for tokens in row.lengths)
        elif row.responses is None:
            raise SimError(f"{path}:{number}: a line needs a prompt and lengths, or responses")
        elif row.kind != "eval":
            for prompt, _, _, tokens, finished in row.responses:
                seen.setdefault(prompt, []).append((tokens, finished))
    if not seen:
        raise SimError(f"{path}: contains no lengths")
    lengths = EmpiricalLengths(_renamed(complete_censored(seen, seed)), seed)
    num = sum(map(len, seen.values()))
    note = f"{num:,} lengths of {len(seen):,} prompts from {path}; speeds and times are guesses"
    base = generic(limit)
    workload = replace(
        base.workload, name=str(path), lengths=lengths, num_prompts=len(seen), note=note
    )
    return replace(base, workload=workload)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of JSONL: `prompt` and `lengths` in a workload; in lengths.jsonl a round with [prompt,
    epoch, index, tokens, finished] of each response."""

    prompt: str = ""
    lengths: tuple[Annotated[int, Field(ge=0)], ...] = ()
    kind: str = ""
    responses: list[tuple[str, int, int, int, bool]] | None = None


def _renamed(lengths: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return `lengths` by the names of the simulator's prompts: p0, p1, and so on."""
    return {f"p{i}": lengths[name] for i, name in enumerate(sorted(lengths))}


def _changed(start: T, changes: Part, key: str) -> T:
    """Return the dataclass `start` with the fields in `changes` replaced."""
    if changes is None:
        return start
    tree = asdict(cast("Any", start)) | changes
    return _parsed(type(start), json.dumps(tree), f"{key}.")


def _parsed(kind: type[T], text: str, prefix: str = "") -> T:
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as e:
        error = e.errors()[0]
        if error["type"] == "json_invalid":
            raise SimError(f"not valid JSON: {error['ctx']['error']}") from None  # pyright: ignore
        if not error["loc"]:
            raise SimError("is not a JSON object") from None
        key = prefix + ".".join(map(str, error["loc"]))
        if error["type"] == "unexpected_keyword_argument":
            raise SimError(f"{key}: unknown key") from None
        raise SimError(f"{key} = {error['input']!r}: {error['msg'].lower()}") from None
