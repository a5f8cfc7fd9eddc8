"""What is simulated: a workload, the hardware under it, what it costs; presets, and files that say
so.

Owns the tables of presets and the reading of workload files and of finished runs. Decides nothing.

A workload file is JSON with any of these parts, or JSONL with one {"prompt": ..., "lengths": [...]}
a line:

    {"base": "generic", "lengths": {"p1": [310, 512]}, "length_model": {...}, "num_prompts": 4096,
     "prompt_tokens": 200, "same_again": 0.5, "reward": {...}, "engine": {...}, "training": {...},
     "transfer": {...}, "prices": {...}, "speculation": {...}}

What the keys of training, transfer and prices mean is said in `costs.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

from lightrl.errors import SimError
from lightrl.sim import models
from lightrl.sim.costs import Prices, Training, Transfer
from lightrl.sim.engine_profile import EngineProfile, SimSpeculation
from lightrl.sim.measured import measured
from lightrl.sim.traces import read_text
from lightrl.sim.workload import (
    FITTED_8K,
    FITTED_16K,
    LONG_REASONING,
    LONG_TAIL,
    SHORT_TAIL,
    EmpiricalLengths,
    LengthModel,
    RewardClass,
    RewardTimes,
    Workload,
    complete_censored,
)

T = TypeVar("T")
# Fields that only a run can tell.
MEASURED = frozenset({"curve", "order", "signal", "ready_s"})
OffloadRule: TypeAlias = Literal["off", "foreseen", "window"]


@dataclass(frozen=True)
class Scenario:
    """All that a simulation needs beside the run's config."""

    workload: Workload
    # By how many times the parallelism of the smallest engine; the planner may go from one to the
    # next.
    engines: Mapping[int, EngineProfile] = field(default_factory=lambda: {1: EngineProfile()})
    training: Training = field(default_factory=Training)
    transfer: Transfer = field(default_factory=Transfer)
    prices: Prices = field(default_factory=Prices)
    # tokens that the cache of a spot node holds, if not as many as that of the others
    spot_kv_tokens: int = 0
    # what switching it on would bring
    speculation: SimSpeculation = field(default_factory=SimSpeculation)
    # and it is not assumed: the run that this is a workload of measured it
    has_speculated: bool = False
    # seconds after which engines send at the latest, as those of a run do; 0 = by tokens
    chunk_s: float = 0.0

    @property
    def engine(self) -> EngineProfile:
        return self.engines[min(self.engines)]


@dataclass(frozen=True, slots=True)
class Switches:
    """What the shell around the core does; the core's own mechanisms are in its Settings."""

    # training begins while responses still run
    streaming: bool = True
    # else all rewards are computed after the rollout
    async_rewards: bool = True
    # of rewards
    adaptive_limit: bool = False
    speculation: bool = False
    # the rule by which rollout nodes change over to training within a round (colocated only)
    offload: OffloadRule = "off"
    # parallelism follows the preemptions
    planner: bool = False
    # else a response that moves starts again from its prompt
    token_collection: bool = True
    exact_finishes: bool = (
        False  # a finish is told at once, not with the next chunk; a race by the clock needs it
    )
    # else what a group has too much runs on, and is scored, until its round closes
    surplus_ends: bool = True
    # else a node on the trainer's machine believes what it finds there
    proves: bool = True
    chunk_tokens: int = 32
    # as real engines send: see `SimEngine`; 0 = not
    chunk_s: float = 0.0


DEFAULT = Switches()


def generic(max_response_tokens: int, prompt_tokens: int = 200) -> Scenario:
    """For a config of which nothing is known: the shape of a published tail, scaled to its
    limit."""
    note = "nothing is known of this model: lengths, speeds and times are guesses; give --workload"
    lengths = SHORT_TAIL.scaled(max_response_tokens)
    return Scenario(Workload("generic", lengths, prompt_tokens=prompt_tokens, note=note))


_MIX = RewardTimes(  # math, code, judge in equal parts
    classes=(
        RewardClass(share=1 / 3, constant_s=0.018, workers=1),
        RewardClass(
            share=1 / 3,
            median_s=1.0,
            sigma=0.1,
            prompt_sigma=0.6,
            hanging=0.05,
            limit_s=30.0,
            workers=44,
        ),
        # On the GPUs that sample, its layers come from the host: twice the latency, twice as many
        # at once.
        RewardClass(share=1 / 3, constant_s=3.0, workers=96, beside=2.0),
    )
)

# Published acceptance, taken low. With history: 65 to 79 % of drafted tokens (RhymeRL, arXiv
# 2508.18588); in the first epoch 1.7 tokens come of a forward pass (Seer, table 2: no references).
# A verified token costs as much as a decoded one.
_HISTORY = SimSpeculation(acceptance=0.65, first_acceptance=0.41, max_window=16, verify_cost=1.0)

# Engines of two, four and eight GPUs with a 32B model. 85 % of 80 GB each hold the weights once, 65
# GB, and keys and values, 256 KiB a token: where four small engines have room for 1.08 M tokens,
# one large one has for 1.8 M. That twice the GPUs are 1.7 times as fast is an assumption.
_LARGE = {
    size: EngineProfile(
        0.020 / 1.7**k, 107, 4e-8 / 1.7**k, 2e-5 / 1.7**k, kv_tokens=(136 * size - 65) * 3800
    )
    for k, size in enumerate((1, 2, 4))
}

_INFINIBAND = 50e9  # 400 Gbit/s, of each machine of eight

# Of RollPacker, section 7.1: calibrated against its figure 12 and table 2, see scripts/studies. A
# node is an engine: one GPU for 7B, two for 14B. A token of context costs the reading of its keys
# and values at 70 % of 3.35 TB/s. Prices: of H100 by the hour, 83.79 dollars for eight, 5.32 for
# two spot ones.
#
# Of RLBoost (arXiv 2510.19225), section 7: eight reserved GPUs as four engines, spot nodes of two;
# a network card of 200 Gbit/s and one of 50 each. All rates are what H100s can do (989 TFLOP/s and
# 3.35 TB/s each), of which decoding gets 75 % and computing 40 %: an engine step of Qwen3-14B on
# two reads 29.5 GB in 5.9 ms and adds up 80 times over NVLink (20 us each), is bound by computing
# above about 300 tokens, and a token of prefill is 2 x 14.8e9 operations; its keys and values take
# 160 KiB. A trained token is 12 x 14.8e9 operations of all eight, and 8 % for attention: forward,
# twice as much backward, forward again (checkpointing), and once each for the old log-probabilities
# and those of the reference. SGLang takes 60 % of the 84.5 GB that it finds free on each GPU for
# weights and cache: 438,000 tokens on a spot node, 347,000 where 7.4 and 3.7 GB of the actor and
# the reference lie already.
PRESETS: dict[str, Callable[[], Scenario]] = {
    "rollpacker-7b-8k": lambda: Scenario(
        Workload("rollpacker-7b-8k", FITTED_8K, reward=_MIX),
        engines={1: EngineProfile(0.0086, 165, 57_344 / 2.345e12, 5e-5, kv_tokens=980_000)},
        training=Training(9.4e-6, 14.4, response_s=0.04, switch_s=3.0, placement="colocated"),
        transfer=models.transfer(models.QWEN2_5_7B, engine_gpus=1, machines=2, line=_INFINIBAND),
        prices=Prices(node=10.47, spot=2.66),
        speculation=_HISTORY,
    ),
    "rollpacker-14b-16k": lambda: Scenario(
        Workload("rollpacker-14b-16k", FITTED_16K, reward=_MIX),
        engines={1: EngineProfile(0.0131, 165, 196_608 / 4.69e12, 8e-5, kv_tokens=540_000)},
        training=Training(9.4e-6, 8.0, response_s=0.0906, switch_s=3.0, placement="colocated"),
        transfer=models.transfer(models.QWEN2_5_14B, engine_gpus=2, machines=4, line=_INFINIBAND),
        prices=Prices(node=20.95, spot=5.32),
        speculation=_HISTORY,
    ),
    "rlboost-14b-14k": lambda: Scenario(
        Workload("rlboost-14b-14k", LONG_REASONING),
        engines={1: EngineProfile(0.0075, 300, 163_840 / 5.03e12, 3.7e-5, kv_tokens=347_000)},
        spot_kv_tokens=438_000,
        training=Training(6.06e-5, 5.0, switch_s=3.0, placement="colocated"),
        transfer=models.transfer(
            models.QWEN3_14B, engine_gpus=2, machines=1, line=25e9, sender_line=25e9
        ),
        prices=Prices(node=83.79 / 4, spot=5.32),
        speculation=_HISTORY,
    ),
    "rollpacker-32b-32k": lambda: Scenario(
        Workload("rollpacker-32b-32k", LONG_TAIL, reward=_MIX),
        engines=_LARGE,
        training=Training(token_s=6e-5, step_s=5.0, switch_s=3.0, placement="colocated"),
        transfer=models.transfer(models.QWEN2_5_32B, engine_gpus=2, machines=8, line=_INFINIBAND),
    ),
}


def require_known(source: str) -> None:
    """Raises SimError, one line, for what is neither a preset nor a file; "" is a guess."""
    known = ["generic", *PRESETS]
    if source and source not in known and not Path(source).is_file():
        raise SimError(
            f"--workload {source}: neither a file, a run nor a preset ({', '.join(known)})"
        )


def find_scenario(source: str, max_response_tokens: int, seed: int) -> Scenario:
    """A preset by name, a workload file, or the directory of a finished run. Raises SimError, one
    line."""
    if not source or source == "generic":
        return generic(max_response_tokens)
    if source in PRESETS:
        return PRESETS[source]()
    path = Path(source)
    is_run = path.is_dir()
    if is_run:
        path = path / "lengths.jsonl"
        if not path.is_file():
            raise SimError(f"{path}: no such file; a run that closed a round has it")
    else:
        require_known(source)
    text = read_text(path)
    if path.suffix == ".jsonl":
        scenario = _from_lines(path, text, max_response_tokens, seed)
        return _speculating(scenario, path.parent) if is_run else scenario
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as e:
        raise SimError(f"{path}:{e.lineno}: not valid JSON: {e.msg}") from None
    try:
        return _from_tree(tree, path.stem, max_response_tokens, seed)
    except (SimError, TypeError, ValueError) as e:
        raise SimError(f"{path}: {e}") from None


def _from_lines(path: Path, text: str, limit: int, seed: int) -> Scenario:
    seen: dict[str, list[tuple[int, bool]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            for prompt, tokens, finished in _responses(row):
                if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
                    raise SimError(f"a length of {tokens!r} tokens cannot be")
                seen.setdefault(str(prompt), []).append((tokens, bool(finished)))
        except json.JSONDecodeError as e:
            raise SimError(f"{path}:{number}: not valid JSON: {e.msg}") from None
        except (SimError, TypeError, ValueError, KeyError) as e:
            raise SimError(f"{path}:{number}: {_text(e)}") from None
    if not seen:
        raise SimError(f"{path}: holds no lengths")
    lengths = EmpiricalLengths(_renamed(complete_censored(seen, seed)), seed)
    num = sum(map(len, seen.values()))
    note = f"{num:,} lengths of {len(seen):,} prompts from {path}; speeds and times are guesses"
    base = generic(limit)
    workload = replace(
        base.workload, name=str(path), lengths=lengths, num_prompts=len(seen), note=note
    )
    return replace(base, workload=workload)


def _speculating(scenario: Scenario, run_dir: Path) -> Scenario:
    """As the run that it is of, if that one did."""
    speculation = measured(run_dir, scenario.speculation)
    if speculation is None:
        return scenario
    note = f"{scenario.workload.note}, how many drafted tokens are kept is measured"
    workload = replace(scenario.workload, note=note)
    return replace(scenario, workload=workload, speculation=speculation, has_speculated=True)


def _responses(row: Any) -> list[tuple[Any, Any, Any]]:
    """(prompt, tokens, finished) of a line: of a workload, or of a round of a run."""
    if not isinstance(row, dict):
        raise SimError("a line is an object with prompt and lengths, or with responses")
    tree = cast("dict[str, Any]", row)
    if "lengths" in tree:
        return [(tree["prompt"], tokens, True) for tokens in tree["lengths"]]
    if tree.get("kind") == "eval":
        return []
    return [(prompt, tokens, finished) for prompt, _, _, tokens, finished in tree["responses"]]


def _from_tree(tree: Any, name: str, limit: int, seed: int) -> Scenario:
    if not isinstance(tree, dict):
        raise SimError("a workload file holds one object")
    parts = dict(cast("dict[str, Any]", tree))
    base = find_scenario(str(parts.pop("base", "generic")), limit, seed)
    workload = replace(base.workload, name=name)
    lengths = parts.pop("lengths", None)
    if lengths is not None:
        workload = replace(
            workload, lengths=EmpiricalLengths(_checked(lengths), seed), num_prompts=len(lengths)
        )
    model = parts.pop("length_model", None)
    if model is not None:
        start = base.workload.lengths
        start = start if isinstance(start, LengthModel) else SHORT_TAIL.scaled(limit)
        workload = replace(workload, lengths=_changed(start, model, "length_model"))
    for key in ("num_prompts", "prompt_tokens"):
        if key in parts:
            workload = replace(workload, **{key: _number(parts.pop(key), key)})
    if "same_again" in parts:
        workload = replace(workload, same_again=float(parts.pop("same_again")))
    if "reward" in parts:
        workload = replace(
            workload, reward=_changed(workload.reward, parts.pop("reward"), "reward")
        )
    engines = dict(base.engines)
    if "engine" in parts:
        engines = {1: _changed(base.engine, parts.pop("engine"), "engine")}
    known: dict[str, Any] = {
        k: getattr(base, k) for k in ("training", "transfer", "prices", "speculation")
    }
    changed = {k: _changed(v, parts.pop(k), k) for k, v in known.items() if k in parts}
    if parts:
        raise SimError(f"{next(iter(parts))}: unknown key")
    return replace(
        base, workload=replace(workload, note=""), engines=engines, **cast("Any", changed)
    )


def _renamed(lengths: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """By the names that the simulator gives its prompts."""
    return {f"p{i}": lengths[name] for i, name in enumerate(sorted(lengths))}


def _checked(lengths: Any) -> dict[str, list[int]]:
    if not isinstance(lengths, dict):
        raise SimError("lengths: an object with a list for each prompt")
    checked: dict[str, list[int]] = {}
    for prompt, values in cast("dict[str, Any]", lengths).items():
        if not isinstance(values, list):
            raise SimError(f"lengths.{prompt}: a list of numbers of tokens")
        checked[prompt] = [_number(v, f"lengths.{prompt}") for v in cast("list[Any]", values)]
    return _renamed(checked)


def _number(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SimError(f"{key} = {value!r}: a positive whole number is needed")
    return value


def _changed(start: T, changes: Any, key: str) -> T:
    """A dataclass with some of its fields replaced by what a file says."""
    if not isinstance(changes, dict) or not is_dataclass(start):
        raise SimError(f"{key}: an object is needed")
    known = {f.name: f for f in fields(start)}
    values: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", changes).items():
        if name not in known or not known[name].init or name in MEASURED:
            keys = ", ".join(k for k in known if k not in MEASURED)
            raise SimError(f"{key}.{name}: unknown key; keys are {keys}")
        old = getattr(start, name)
        if name == "classes" and isinstance(value, list):
            rows = cast("list[Any]", value)
            value = tuple(_changed(RewardClass(), row, f"{key}.classes") for row in rows)
        elif name == "speculation" and value is not None:
            value = _changed(old or SimSpeculation(), value, f"{key}.speculation")
        elif isinstance(value, bool) != isinstance(old, bool) or not isinstance(
            value, type(old) | int
        ):
            raise SimError(f"{key}.{name} = {value!r}: a {type(old).__name__} is needed")
        values[name] = value
    return cast("T", replace(cast("Any", start), **values))


def _text(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
