"""The run's configuration: its sections, and what follows from several of their keys.

run_file.py reads it, rules.py has the rules on several keys. Must stay importable without torch.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, Field, model_validator

from lightrl.config import sections
from lightrl.config.algorithm import AlgorithmSection
from lightrl.config.data import Data
from lightrl.config.environment import Environment, completed
from lightrl.config.evaluation import Eval, EvalSampling, EvaluationSet
from lightrl.config.logging import Logging
from lightrl.config.reward import Reward, with_environment
from lightrl.config.scale import Offload, PriceSection, ScaleSection

CHECKPOINTS = "checkpoints"  # in the run directory
DEFAULT_TIS_BOUNDS = (0.0, 2.0)
ROUNDING_ARGS = frozenset({"dtype", "quantization", "kv_cache_dtype"})  # of vLLM
LORA_ARGS = frozenset({"enable_lora", "max_lora_rank", "max_loras"})
PARALLEL_ARGS = frozenset({"tensor_parallel_size", "pipeline_parallel_size"})


class Config(sections.Section):
    run: sections.Run = sections.Run()
    model: sections.Model
    data: Data = Data()
    rollout: sections.Rollout = sections.Rollout()
    train: sections.Train = sections.Train()
    algorithm: AlgorithmSection = AlgorithmSection()
    round: sections.RoundSection = sections.RoundSection()
    async_: sections.AsyncSection = Field(default=sections.AsyncSection(), alias="async")
    speculation: sections.Speculation = sections.Speculation()
    environment: Environment = Environment()
    reward: Reward = Reward()
    eval: Eval = Eval()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    node: sections.NodeSection = sections.NodeSection()
    weights: sections.Weights = sections.Weights()
    prices: PriceSection = PriceSection()
    scale: ScaleSection = ScaleSection()
    offload: Offload = Offload()
    journal: sections.Journal = sections.Journal()
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _environment(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return completed(with_environment(cast("dict[str, Any]", tree)))

    def key_value(self, key: str) -> str:
        """Return a dotted key with its value, as in messages. Example: "train.ranks = 2"."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, "async_" if part == "async" else part)
        values = cast("tuple[Any, ...]", value if isinstance(value, tuple) else (value,))
        if value == "" or any(isinstance(v, dict | BaseModel) for v in values):
            return key
        text = f"{value:g}" if isinstance(value, float) else repr(cast("object", value))
        if isinstance(value, tuple):
            text = str([*values])
        return f"{key} = {str(value).lower() if isinstance(value, bool) else text}"

    @property
    def eval_sets(self) -> tuple[EvaluationSet, ...]:
        """All sets to evaluate, with the defaults of all keys but those of `eval_sampling`."""
        return self.eval.all_sets(self.data)

    def eval_sampling(self, one: EvaluationSet) -> EvalSampling:
        """Return how the prompts of one of `eval_sets` are answered."""
        return self.eval.sampling(one, self.rollout.max_response_length)

    @property
    def reward_functions(self) -> set[str]:
        """Return the names of the reward functions of all sets."""
        sets = (*self.data.all_sets, *self.eval_sets)
        return {name for one in sets for name in one.reward or self.reward.functions}

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    def checkpoints(self, run_dir: Path) -> Path:
        """Return the directory of checkpoints. `run_dir`: of the run on this machine."""
        if self.checkpoint.dir:
            run_dir = Path(self.checkpoint.dir).resolve() / self.run.name
        return run_dir / CHECKPOINTS

    @property
    def gpus_per_engine(self) -> int:
        sizes = (self.rollout.engine_args.get(name) for name in PARALLEL_ARGS)
        return math.prod(n for n in sizes if isinstance(n, int) and n > 0)

    @property
    def device_parts(self) -> int:
        """Parts of the devices that sample and train in turn, each of which can train without the
        others: the replicas, if no node and no engine has devices of two of them; else 1."""
        train, rollout = self.train, self.rollout
        if rollout.placement == "own" or self.run.deterministic or train.replicas % train.nodes:
            return 1
        each, size = train.world // train.replicas, self.gpus_per_engine
        devices = list(train.devices or range(train.ranks))
        used = [k for k, d in enumerate(devices) if d in (rollout.devices or devices)]
        engines = (used[i : i + size] for i in range(0, len(used) - size + 1, size))
        are_apart = all(k[0] // each == k[-1] // each for k in engines)
        return train.replicas if are_apart and size <= each else 1

    @property
    def device_parts_each(self) -> int:
        """The parts on each trainer node."""
        return max(1, self.device_parts // self.train.nodes)

    @property
    def launched(self) -> tuple[int, int]:
        """Prompts of a short round, and responses to each."""
        prompts, responses = self.round.etas
        each = round(responses * self.rollout.group_size)
        return round(prompts * self.train.prompts_per_step), each

    @property
    def orders_attention(self) -> bool:
        """Return whether ranks on GPUs use the deterministic backward pass of attention."""
        wanted = self.train.deterministic
        return self.run.deterministic or (self.journal.enabled if wanted == "auto" else wanted)

    @property
    def speculates(self) -> bool:
        """False in a deterministic run: the number of drafted tokens depends on time, and with it
        the shapes of batches and their rounding."""
        return self.speculation.enabled and not self.run.deterministic

    @property
    def deferred(self) -> Literal["restart", "continue"]:
        """`round.deferred`, or its default. In a deterministic run it is restart: the length of a
        response that is put off depends on time."""
        return self.round.deferred or ("restart" if self.run.deterministic else "continue")

    @property
    def continues(self) -> bool:
        """Return whether responses that were put off are trained with tokens of older versions."""
        return self.round.tail_batching != "off" and self.deferred == "continue"

    @property
    def broadcast(self) -> Literal["auto", "always", "off"]:
        """`weights.broadcast`, but off instead of auto for an asynchronous run, where the trainer
        would wait for the members of each version, and for adapters, which are small."""
        mode = self.weights.broadcast
        is_idle = bool(self.async_.max_staleness or self.model.lora.rank)
        return "off" if mode == "auto" and is_idle else mode

    @property
    def has_deltas(self) -> bool:
        """Return whether differences between versions are published; never for adapters."""
        return self.weights.delta == "auto" and not self.model.lora.rank

    def tis_bounds(self, is_float32: bool) -> tuple[float, float] | None:
        """Return `algorithm.tis_bounds`, or its default; None = off. `is_float32`: the trainer
        computes and publishes in float32, so that engines that round alike agree with it."""
        given = self.algorithm.tis_bounds
        if self.algorithm.old_logprobs == "rollout" or given == "off":
            return None
        if given is not None:
            return given
        is_exact = is_float32 and not ROUNDING_ARGS.intersection(self.rollout.engine_args)
        is_fresh = not self.async_.max_staleness and not self.continues
        return None if is_exact and is_fresh else DEFAULT_TIS_BOUNDS

    @property
    def max_trained_length(self) -> int:
        """Tokens of the longest prompt with the longest response in training, or of the longest
        episode."""
        if self.environment.enabled and self.environment.max_length:
            return self.environment.max_length
        return self.data.max_prompt_length + self.rollout.max_response_length

    @property
    def max_model_length(self) -> int:
        """Tokens of the longest sequence of an engine: an evaluation may allow more."""
        if self.environment.enabled and self.environment.max_length:
            return self.max_trained_length
        _, evaluated = self.eval.longest(self.rollout.max_response_length)
        return max(self.max_trained_length, self.data.max_prompt_length + evaluated)


SECTIONS = tuple(info.alias or name for name, info in Config.model_fields.items())


def keys() -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default, description) of every key, in the order of a file."""
    yield from _keys(Config, "")


def takes_text(key: str) -> bool:
    """Return whether the value of a dotted key is text, or a list of texts."""
    kind: Any = Config
    for part in key.split("."):
        fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
        kind = next((f.annotation for n, f in fields.items() if (f.alias or n) == part), None)
    return kind is str or (get_origin(kind) is not dict and str in get_args(kind))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for attribute, info in section.model_fields.items():
        kind, name = info.annotation, info.alias or attribute
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        default = "(required)"
        if not info.is_required():
            default = json.dumps(info.get_default(call_default_factory=True))
        yield f"{prefix}{name}", default, " ".join((info.description or "").split())
        for table in get_args(kind):  # a list of tables
            if isinstance(table, type) and issubclass(table, BaseModel):
                yield from _keys(table, f"{prefix}{name}[].")
