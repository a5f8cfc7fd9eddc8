"""The run's TOML file: read with dotted overrides, checked, written. Each mistake is one line."""

import datetime
import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from lightrl.config.rules import conflict
from lightrl.config.schema import SECTIONS, Config, keys, takes_text
from lightrl.config.values import expanded, is_data_file, one_or_many, shortened
from lightrl.errors import ConfigError

CONFIG_FILE = "config.toml"  # in the directory of a run
MOST_LISTED = 4  # keys of a section, in a line
# Names of verl, TRL and others; the table of configs/README.md has these and more.
OTHER_NAMES = {
    "n": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_response_length",
    "max_tokens": "rollout.max_response_length",
    "train_batch_size": "train.prompts_per_step",
    "batch_size": "train.prompts_per_step",
    "ppo_mini_batch_size": "train.mini_batches",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_gpu",
    "learning_rate": "train.optim.lr",
    "max_grad_norm": "train.optim.grad_clip",
    "max_steps": "train.steps",
    "total_training_steps": "train.steps",
    "epochs": "train.steps",
    "total_epochs": "train.steps",
    "num_train_epochs": "train.steps",
    "gradient_checkpointing": "train.activation_checkpointing",
    "beta": "algorithm.kl_coef",
    "kl": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.clip_dual",
    "tis_cap": "algorithm.tis_bounds",
    "adv_estimator": "algorithm.name",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "reward_kwargs": "reward.kwargs",
    "r": "model.lora.rank",
    "target_modules": "model.lora.targets",
    "gpu_memory_utilization": "rollout.engine_args.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.engine_args.tensor_parallel_size",
    "tensor_model_parallel_size": "rollout.engine_args.tensor_parallel_size",
    "model_name_or_path": "model.path",
    "model.model": "model.path",
    "model.name": "model.path",
    "train_files": "data.path",
    "dataset_name": "data.path",
    "val_files": "eval.path",
    "save_freq": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "resume_from_path": "checkpoint.initial_load_path",
    "resume_from_checkpoint": "checkpoint.initial_load_path",
    "test_freq": "eval.interval",
    "eval_steps": "eval.interval",
}

RENAMED = {("algorithm", "tis_cap"): "tis_bounds"}  # keys of an earlier release
PATH_KEYS = (
    *(("model", "path"), ("data", "path"), ("eval", "path")),
    ("checkpoint", "initial_load_path"),
)
SECTIONS_WITH_SETS = ("data", "eval")


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in `path` with dotted `section.key=value` overrides.

    Paths are relative to the file; in an override, to the working directory. Raises ConfigError,
    one line that names the key and the value.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None
    _anchor(tree, path.resolve().parent)
    for (section, before), now in RENAMED.items():
        table = _table(tree, section)
        if before in table and now not in table:
            table[now] = table.pop(before)
    for override in overrides:
        _apply(tree, override)
    _anchor(tree, Path.cwd())
    checkpoint = _table(tree, "checkpoint")
    if isinstance(folder := checkpoint.get("dir"), str) and folder:
        checkpoint["dir"] = str(Path(expanded(folder)).absolute())  # a resume may begin elsewhere
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    """Return the config of `tree`. Raises ConfigError for its first mistake."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as e:
        raise ConfigError(_one_line(e)) from None
    if problem := conflict(config):
        raise ConfigError(problem)
    return config


def to_toml(config: Config) -> str:
    """Return the resolved config as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    for name, section in config.model_dump(mode="json", exclude_none=True).items():
        _dump_table(name, section, lines)
    return "\n".join(lines)


def _anchor(tree: dict[str, Any], folder: Path) -> None:
    for section, key in PATH_KEYS:
        table = _table(tree, section)
        if isinstance(table.get(key), str):
            table[key] = _anchored(f"{section}.{key}", table[key], folder)
    for section in SECTIONS_WITH_SETS:
        for table in _sets(tree, section):
            if isinstance(table.get("path"), str):
                table["path"] = _anchored(f"{section}.sets[].path", table["path"], folder)
            _anchor_functions(table, f"{section}.sets[].reward", "reward", folder)
    _anchor_functions(_table(tree, "reward"), "reward.functions", "functions", folder)
    environment = _table(tree, "environment")
    _anchor_functions(environment, "environment.tools", "tools", folder)
    if isinstance(source := environment.get("source"), str) and ".py:" in source:
        adapter, _, rest = source.partition(":")  # as in trl:FILE.py:CLASS
        prefix, rest = (f"{adapter}:", rest) if ".py:" in rest else ("", source)
        environment["source"] = prefix + _anchored("environment.source", rest, folder)


def _anchor_functions(table: dict[str, Any], dotted: str, key: str, folder: Path) -> None:
    functions: Any = one_or_many(table.get(key))
    if isinstance(functions, list | tuple):
        named = cast("list[Any]", functions)
        table[key] = [
            _anchored(dotted, f, folder) if isinstance(f, str) and ".py:" in f else f for f in named
        ]


def _sets(tree: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """Return the tables among the sets of a section."""
    sets: Any = _table(tree, section).get("sets")
    given = cast("list[Any]", sets) if isinstance(sets, list) else []
    return [cast("dict[str, Any]", one) for one in given if isinstance(one, dict)]


def _table(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the section if it is a table, else {}: validation refuses it."""
    table = tree.get(key)
    return cast("dict[str, Any]", table) if isinstance(table, dict) else {}


def _anchored(key: str, value: str, folder: Path) -> str:
    """Return an absolute path; a hub id ("org/name") is unchanged unless such a file is there."""
    value = expanded(value, folder)
    file, colon, rest = value.partition(".py:")
    candidate = folder / (file + ".py" if colon else value)
    looks_local = value.startswith(".") or colon or is_data_file(value)
    try:
        if value and not Path(value).is_absolute() and (candidate.exists() or looks_local):
            return str(candidate.resolve()) + (f":{rest}" if colon else "")
    except (OSError, ValueError) as e:  # too long, a zero byte, a directory without permission
        raise ConfigError(f"{key} = {shortened(value)}: cannot be looked up: {e}") from None
    return value


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or "." not in key:
        raise ConfigError(f"{override!r}: an override looks like section.key=value")
    *parents, leaf = key.strip().split(".")
    leaf = RENAMED.get((".".join(parents), leaf), leaf)
    table = tree
    for parent in parents:
        section: Any = table.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{key}: {parent} is not a section")
        table = cast("dict[str, Any]", section)
    try:
        table[leaf] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[leaf] = text  # a bare word is a string
    given: Any = table[leaf]
    is_text = takes_text(key.strip()) and not isinstance(given, str | list | dict)
    if is_text or isinstance(given, datetime.date | datetime.time):
        table[leaf] = text.strip()  # a name may look like a number


def _one_line(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    path = _dotted(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{'.'.join(path)}: unknown key{_nearest(path)}"
    given: object = problem["input"]
    path = [p for p in path if not _is_member(p)]
    dotted = ".".join(path)
    match problem["type"]:
        case "missing":
            return f"{_first_required(dotted)}: is required"
        case "model_type":
            given = shortened(problem["input"])
            return f"{dotted} = {given}: is a section; its keys are {_section_keys(dotted)}"
        case "value_error":
            return problem["msg"].removeprefix("Value error, ")
        case "string_type" if isinstance(given, list) and path[-1] == "path":
            several = "several go into one folder"
            if path[0] in SECTIONS_WITH_SETS:
                several = f"several are [[{path[0]}.sets]]"
            return f"{dotted} = {shortened(cast('object', given))}: is one path; {several}"
        case _:
            text = problem["msg"].replace("tuple", "list")  # TOML has no tuples
            if words := "".join(f" or {word}" for word in _literals(error, problem["loc"])):
                text = text.partition(",")[0] + words
            return f"{dotted} = {shortened(problem['input'])}: {text[0].lower()}{text[1:]}"


def _is_member(part: str) -> bool:
    """Return whether this is pydantic's name of a member of a union, not a key."""
    return part.startswith(("literal[", "constrained-")) or part in {"float", "int", "str"}


def _literals(error: ValidationError, place: tuple[int | str, ...]) -> list[str]:
    """Return the words that the other members of a union at `place` allow."""
    return [
        str(other.get("ctx", {}).get("expected"))
        for other in error.errors(include_url=False)[1:]
        if other["type"] == "literal_error"
        and other["loc"][:-1] == place[:-1]
        and _is_member(str(place[-1]))
    ]


def _dotted(place: Sequence[int | str]) -> list[str]:
    """Return the names that lead to a key, with the index of a table in a list."""
    path: list[str] = []
    for k, part in enumerate(place):
        if isinstance(part, str):
            path.append(part)
        elif k + 1 < len(place) and path[1:] == ["sets"]:
            path[-1] += f"[{part}]"
    return path


def _first_required(dotted: str) -> str:
    """Return the required key of a section that is missing."""
    required = (key for key, default, _ in keys() if default == "(required)")
    return next((key for key in required if key.startswith(f"{dotted}.")), dotted)


def _nearest(path: Sequence[str]) -> str:
    """Return a hint for an unknown key."""
    known = [key for key, _, _ in keys()]
    dotted, leaf = ".".join(path), path[-1]
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    same.sort(key=lambda k: k.partition(".")[0] != path[0])  # of the same section first
    if len(path) == 1:
        nested = (k.rpartition(".")[0] for k in known if k.count(".") > 1)
        sections = {name.rpartition(".")[2]: name for name in (*nested, *SECTIONS)}
        found = difflib.get_close_matches(leaf, sections, n=1)
        close = [f"[{sections[name]}]" for name in found] or same or _of_others(dotted)
        return f"; did you mean {close[0]}?" if close else f"; sections are {', '.join(SECTIONS)}"
    parent = re.sub(r"\[\d+]", "[]", ".".join(path[:-1]))
    siblings = [k for k in known if k.rpartition(".")[0] == parent]
    names = {k.rpartition(".")[2]: k for k in siblings}
    close = (
        _of_others(dotted)
        or [k for k in known if k.replace(".", "_") == dotted.replace(".", "_")]
        or [names[n] for n in difflib.get_close_matches(leaf, names, n=1, cutoff=0.6)]
        or same
    )
    return f"; did you mean {close[0]}?" if close else f"; keys are {', '.join(siblings)}"


def _of_others(dotted: str) -> list[str]:
    found = OTHER_NAMES.get(dotted) or OTHER_NAMES.get(dotted.rpartition(".")[2])
    return [found] if found else []


def _section_keys(dotted: str) -> str:
    inside = [key for key, _, _ in keys() if key.startswith(f"{dotted}.")]
    return ", ".join(inside) if len(inside) <= MOST_LISTED else f"{dotted}.KEY"


def _dump_table(name: str, table: dict[str, Any], lines: list[str]) -> None:
    lines.append(f"[{name}]")
    nested: list[tuple[str, dict[str, Any]]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            nested.append((key, cast("dict[str, Any]", value)))
        else:
            lines.append(f"{_key(key)} = {toml_value(value)}")
    lines.append("")
    for key, value in nested:
        _dump_table(f"{name}.{_key(key)}", value, lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """Return a TOML value on one line. JSON differs in tables and in DEL."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in table.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, cast("list[Any]", value))) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
