"""The run's configuration: one TOML file, dotted overrides, validated. Owns every key, default and
allowed value; knows nothing of what they are used for. Must stay importable without torch.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lightrl.errors import ConfigError


class Section(BaseModel):
    # The config travels as JSON, which knows neither infinity nor NaN.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def _one_or_many(value: Any) -> Any:
    """A bare string where a list of them is possible."""
    return (value,) if isinstance(value, str) else value


def _not_plain(value: Any) -> str | None:
    """Why a value of engine_args would not come back the same from JSON and TOML."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        return next((p for v in cast("list[Any]", value) if (p := _not_plain(v))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} cannot be sent to nodes"
    if not isinstance(value, str | int | float):
        return f"{_short(value)} has the type {type(value).__name__}, which cannot be sent to nodes"
    return None


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]

Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++"]
LossNorm = Literal["token", "sequence", "constant"]
EngineKind = Literal["auto", "vllm", "torch", "emulated"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["jsonl", "tensorboard", "wandb"]


class Run(Section):
    name: str = Field(default="run", pattern=NAME_PATTERN, description="directory below run.dir")
    dir: str = Field(default="runs", description="where run directories live")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="order of the data and noise of every sampled token"
    )
    bind: str = Field(
        default="tcp://127.0.0.1:5600", description="where the coordinator listens; port * = any"
    )


class Model(Section):
    path: str = Field(description="HF model directory or hub id")
    dtype: Dtype = Field(
        default="auto", description="of the engines; auto = as stored on CPU, bfloat16 on GPU"
    )


class Data(Section):
    path: str = Field(description="JSONL or parquet file of prompts, or an HF datasets id")
    prompt_key: str = Field(default="prompt", description="column with the prompt: text or chat messages")
    answer_key: str = Field(default="answer", description="column with the reference answer, if there is one")
    max_prompt_length: Positive = Field(default=1024, description="tokens; a longer prompt is an error")
    shuffle: bool = Field(default=True, description="a new order every epoch, from run.seed")
    system_prompt: str = Field(default="", description="put before chat prompts that bring no system message")


class Rollout(Section):
    engine: EngineKind = Field(default="auto", description="auto = vllm where it is installed, else torch")
    nodes: Annotated[int, Field(ge=0)] = Field(
        default=1, description="rollout daemons that `lightrl up` starts here"
    )
    slots: Positive = Field(default=64, description="responses that run at once on a node")
    group_size: Positive = Field(default=8, description="responses sampled for one prompt")
    max_response_length: Positive = Field(default=1024, description="tokens")
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 = off")
    threads: Positive = Field(default=1, description="CPU threads of one engine")
    kv_cache_gib: float = Field(
        default=0.0, ge=0, description="KV cache of a CPU engine; 0 = what slots need"
    )
    chunk_tokens: Positive = Field(default=16, description="tokens of a response after which a chunk is sent")
    chunk_ms: Positive = Field(default=50, description="milliseconds after which a chunk is sent anyway")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="handed to vLLM as they are")


class Optim(Section):
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, ge=0, description="maximal gradient norm; 0 = off")
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up, then constant")


class Train(Section):
    steps: Positive = Field(default=100, description="optimizer steps of the run")
    prompts_per_step: Positive = Field(default=32, description="groups that feed one optimizer step")
    ranks: Positive = Field(default=1, description="training processes on the trainer node")
    max_tokens_per_gpu: Positive = Field(default=16384, description="tokens of one micro-batch on one rank")
    threads: Positive = Field(default=1, description="CPU threads of one rank")
    activation_checkpointing: bool = False
    optim: Optim = Optim()


class AlgorithmSection(Section):
    name: Algorithm = "grpo"
    clip_low: float = Field(default=0.2, ge=0, description="ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(default=0.2, ge=0, description="ratio is clipped above at 1 + clip_high")
    kl_coef: float = Field(default=0.0, ge=0, description="0 = no reference model is loaded")
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    loss_norm: LossNorm | None = Field(default=None, description="default: what the algorithm prescribes")
    loss_constant: Positive | None = Field(
        default=None,
        description='tokens per response that loss_norm = "constant" divides by; default max_response_length',
    )
    tis_cap: float = Field(default=0.0, ge=0, description="cap of the truncated importance weight; 0 = off")


class Reward(Section):
    functions: Names = Field(default=("exact_match",), description='"path.py:function" or a built-in name')
    weights: tuple[float, ...] = Field(default=(), description="one for each function; default all 1")
    workers: Positive = Field(default=1, description="reward processes")
    timeout_s: Seconds = Field(default=10.0, description="limit of one call, counted from its start")
    on_failure: float | Literal["drop"] = Field(
        default="drop", description="a response without a score: drop its group, or give it this reward"
    )


class Eval(Section):
    path: str = Field(
        default="", description="held-out prompts in the layout of data.path; empty = no evaluation"
    )
    interval: int = Field(default=0, ge=0, description="steps between evaluations; 0 = only first and last")
    samples: Positive = Field(default=1, description="responses for each prompt")
    temperature: float = Field(default=0.0, ge=0)


class Checkpoint(Section):
    interval: int = Field(default=0, ge=0, description="steps between checkpoints; 0 = only the last")
    keep_last: Positive = Field(default=2, description="checkpoints kept")


class NodeSection(Section):
    heartbeat_s: Seconds = 0.5
    lease_s: Seconds = Field(default=5.0, description="a node not heard of for so long is lost")
    grace_s: Seconds = Field(default=20.0, description="a stopping daemon gives its children so long")


class Logging(Section):
    backends: Annotated[tuple[Backend, ...], BeforeValidator(_one_or_many)] = ("jsonl",)


class Config(Section):
    run: Run = Run()
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    train: Train = Train()
    algorithm: AlgorithmSection = AlgorithmSection()
    reward: Reward = Reward()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    node: NodeSection = NodeSection()
    logging: Logging = Logging()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.run.name == "latest":
            raise ValueError("run.name = 'latest': is the link to the newest run; choose another name")
        if problem := _not_plain(self.rollout.engine_args):
            raise ValueError(f"rollout.engine_args: {problem}")
        weights, functions = self.reward.weights, self.reward.functions
        if weights and len(weights) != len(functions):
            raise ValueError(f"reward.weights: {len(weights)} weights for {len(functions)} reward.functions")
        if not functions:
            raise ValueError("reward.functions: at least one is needed")
        if self.node.lease_s < 2 * self.node.heartbeat_s:
            raise ValueError(
                f"node.lease_s = {self.node.lease_s}: must be at least twice "
                f"node.heartbeat_s = {self.node.heartbeat_s}, or healthy nodes are lost"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def max_model_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_length + self.rollout.max_response_length


PATH_KEYS = (("model", "path"), ("data", "path"), ("eval", "path"))


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in `path` with dotted `section.key=value` overrides applied.

    Relative paths in the file are relative to the file; in an override, to the working directory.
    Raises ConfigError, one line, naming the dotted key and the value.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None
    _anchor(tree, path.resolve().parent)
    for override in overrides:
        _apply(tree, override)
    _anchor(tree, Path.cwd())
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    """Raises ConfigError for the first thing that is wrong in `tree`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as e:
        raise ConfigError(_one_line(e)) from None


def to_toml(config: Config) -> str:
    """The resolved config as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    for name, section in config.model_dump(mode="json", exclude_none=True).items():
        _dump_table(name, section, lines)
    return "\n".join(lines)


def keys() -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of every key, in file order: the config reference."""
    yield from _keys(Config, "")


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            default = (
                "(required)"
                if info.is_required()
                else json.dumps(info.get_default(call_default_factory=True))
            )
            yield f"{prefix}{name}", default, info.description or ""


def _anchor(tree: dict[str, Any], folder: Path) -> None:
    for section, key in PATH_KEYS:
        table = _table(tree, section)
        if isinstance(table.get(key), str):
            table[key] = _anchored(f"{section}.{key}", table[key], folder)
    reward = _table(tree, "reward")
    functions: Any = _one_or_many(reward.get("functions"))
    if isinstance(functions, list | tuple):
        named = cast("list[Any]", functions)
        reward["functions"] = [
            _anchored("reward.functions", f, folder) if isinstance(f, str) and ".py:" in f else f
            for f in named
        ]


def _table(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """The section if there is one and it is a table; validation will complain if it is not."""
    table = tree.get(key)
    return cast("dict[str, Any]", table) if isinstance(table, dict) else {}


def _anchored(key: str, value: str, folder: Path) -> str:
    """Hub ids ("org/name") stay as they are unless such a file lies beside the config."""
    file, colon, rest = value.partition(".py:")
    candidate = folder / (file + ".py" if colon else value)
    looks_local = value.startswith(".") or colon or Path(value).suffix in {".jsonl", ".parquet", ".json"}
    try:
        if value and not Path(value).is_absolute() and (candidate.exists() or looks_local):
            return str(candidate.resolve()) + (f":{rest}" if colon else "")
    except (OSError, ValueError) as e:  # too long, a zero byte, a directory that may not be looked into
        raise ConfigError(f"{key} = {_short(value)}: cannot be looked up: {e}") from None
    return value


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or "." not in key:
        raise ConfigError(f"{override!r}: an override looks like section.key=value")
    *parents, leaf = key.strip().split(".")
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


def _one_line(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"] if isinstance(part, str)]
    if problem["type"] == "extra_forbidden":
        return f"{'.'.join(path)}: unknown key{_nearest(path)}"
    # After the key, pydantic names the member of the union that was tried.
    path = [p for p in path if not p.startswith("literal[") and p not in {"float", "int", "str"}]
    dotted = ".".join(path)
    match problem["type"]:
        case "missing":
            return f"{_first_required(dotted)}: is required"
        case "model_type":
            return f"{dotted} = {_short(problem['input'])}: is a section; its keys are {dotted}.KEY"
        case "value_error":
            return problem["msg"].removeprefix("Value error, ")
        case _:
            text = problem["msg"]
            return f"{dotted} = {_short(problem['input'])}: {text[0].lower()}{text[1:]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _first_required(dotted: str) -> str:
    """The key that is missing when a whole section is."""
    required = (key for key, default, _ in keys() if default == "(required)")
    return next((key for key in required if key.startswith(f"{dotted}.")), dotted)


def _nearest(path: Sequence[str]) -> str:
    known = [key for key, _, _ in keys()]
    dotted = ".".join(path)
    sections = list(Config.model_fields)
    leaf = [k for k in known if k.rpartition(".")[2] == path[-1]]
    if len(path) == 1:
        close = [f"[{name}]" for name in difflib.get_close_matches(path[0], sections, n=1)] or leaf
        return f"; did you mean {close[0]}?" if close else f"; sections are {', '.join(sections)}"
    siblings = [k for k in known if k.rpartition(".")[0] == ".".join(path[:-1])]
    close = (
        difflib.get_close_matches(dotted, siblings, n=1, cutoff=0.75)
        or leaf
        or difflib.get_close_matches(dotted, known, n=1, cutoff=0.5)
    )
    return f"; did you mean {close[0]}?" if close else f"; keys are {', '.join(siblings)}"


def _dump_table(name: str, table: dict[str, Any], lines: list[str]) -> None:
    lines.append(f"[{name}]")
    nested: list[tuple[str, dict[str, Any]]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            nested.append((key, cast("dict[str, Any]", value)))
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    lines.append("")
    for key, value in nested:
        _dump_table(f"{name}.{_key(key)}", value, lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    """One TOML value on one line; tables in lists are inline. JSON differs in these and in DEL."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in table.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, cast("list[Any]", value))) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
