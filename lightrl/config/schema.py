"""The run's configuration: its sections, and which of their values go together.

Knows nothing of what they are used for, nor of files (run_file.py). Must stay importable without
torch.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args, get_origin

from pydantic import BaseModel, Field, model_validator

from lightrl.config.algorithm import UNGROUPED, AlgorithmSection
from lightrl.config.data import Data
from lightrl.config.evaluation import Eval, EvalSampling, EvalSet
from lightrl.config.logging import Logging
from lightrl.config.model import Lora, Model
from lightrl.config.parallel import num_parts, why_no_sizes
from lightrl.config.reward import Reward, with_environment
from lightrl.config.scale import Offload, Prices, ScaleSection
from lightrl.config.sections import (
    AsyncSection,
    Checkpoint,
    Journal,
    NodeSection,
    Rollout,
    RoundSection,
    Run,
    Section,
    Speculation,
    Train,
    Weights,
)
from lightrl.config.values import not_plain

CHECKPOINTS = "checkpoints"  # in the run directory
DEFAULT_TIS_BOUNDS = (0.0, 2.0)
ROUNDING_ARGS = frozenset({"dtype", "quantization", "kv_cache_dtype"})  # of vLLM
LORA_ARGS = frozenset({"enable_lora", "max_lora_rank", "max_loras"})  # likewise


class Config(Section):
    run: Run = Run()
    model: Model
    data: Data = Data()
    rollout: Rollout = Rollout()
    train: Train = Train()
    algorithm: AlgorithmSection = AlgorithmSection()
    round: RoundSection = RoundSection()
    async_: AsyncSection = Field(default=AsyncSection(), alias="async")
    speculation: Speculation = Speculation()
    reward: Reward = Reward()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    node: NodeSection = NodeSection()
    weights: Weights = Weights()
    prices: Prices = Prices()
    scale: ScaleSection = ScaleSection()
    offload: Offload = Offload()
    journal: Journal = Journal()
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _environment(cls, tree: Any) -> Any:
        return with_environment(cast("dict[str, Any]", tree)) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.run.name == "latest":
            raise ValueError(
                "run.name = 'latest': is the link to the newest run; choose another name"
            )
        if problem := not_plain(self.rollout.engine_args):
            raise ValueError(f"rollout.engine_args: {problem}")
        if self.rollout.engine_args.get("trust_remote_code"):
            raise ValueError(
                "rollout.engine_args: trust_remote_code: LightRL runs no code of a model directory"
            )
        if self.node.lease_s < 2 * self.node.heartbeat_s:
            raise ValueError(
                f"node.lease_s = {self.node.lease_s}: must be at least twice "
                f"node.heartbeat_s = {self.node.heartbeat_s}, or healthy nodes are lost"
            )
        return self

    @model_validator(mode="after")
    def _data(self) -> Self:
        data = self.data
        if not data.all_sets and not self.eval.checkpoint:
            raise ValueError("data.path: is required, or at least one [[data.sets]]")
        if problem := not_plain(data.chat_template_kwargs):
            raise ValueError(f"data.chat_template_kwargs: {problem}")
        if not all(self.rollout.stop):
            raise ValueError("rollout.stop = '': is in every text; leave it out")
        self.reward.require_use(self.reward_functions)
        return self

    @model_validator(mode="after")
    def _in_turn(self) -> Self:
        """Devices that sample and train, or those of engines of several sizes."""
        ahead, rule = self.async_.max_staleness, self.offload.rule
        if problem := why_no_sizes(self.rollout, ahead, self.run.deterministic):
            raise ValueError(f"rollout.parallel = {list(self.rollout.parallel)}: {problem}")
        if ahead and self.rollout.placement == "shared":
            raise ValueError(
                f"rollout.placement = 'shared': with async.max_staleness = {ahead} nodes sample "
                "while the trainer trains, and both need the devices; leave one of them out"
            )
        if rule != "foreseen" and self.rollout.placement == "own":
            raise ValueError(
                f"offload.rule = {rule!r}: with rollout.placement = 'own' no devices change sides; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        prompts, responses = self.train.prompts_per_step, self.rollout.group_size
        mode = self.round.tail_batching
        if mode != "off" and self.launched == (prompts, responses):
            raise ValueError(
                f"round.eta = {self.round.eta}: with round.tail_batching = {mode!r} this "
                f"over-provisions nothing: {prompts} prompts x {responses} responses are needed "
                "and launched; raise it"
            )
        if self.train.engine == "emulated" and self.rollout.engine != "emulated":
            raise ValueError(
                f"rollout.engine = {self.rollout.engine!r}: only 'emulated' can load what "
                "train.engine = 'emulated' publishes, which is no model"
            )
        if self.weights.broadcast == "always" and self.rollout.engine == "emulated":
            raise ValueError(
                "weights.broadcast = 'always': rollout.engine = 'emulated' has no memory to "
                "receive weights in; leave it out"
            )
        every, interval = self.checkpoint.keep_every, self.checkpoint.interval
        if every and (not interval or every % interval):
            raise ValueError(
                f"checkpoint.keep_every = {every}: there are no checkpoints of these steps with "
                f"checkpoint.interval = {interval}; give a multiple of it"
            )
        is_held_to_own = self.algorithm.old_logprobs == "trainer"
        if self.continues and self.algorithm.tis_bounds == "off" and is_held_to_own:
            raise ValueError(
                "algorithm.tis_bounds = 'off': deferred responses continue with tokens of older "
                "versions, which is biased without importance weights; leave it out, or set "
                "round.deferred = 'restart'"
            )
        if self.async_.max_staleness and self.algorithm.tis_bounds == "off" and is_held_to_own:
            raise ValueError(
                "algorithm.tis_bounds = 'off': async.max_staleness = "
                f"{self.async_.max_staleness} trains tokens of older versions, which is biased "
                "without importance weights; leave it out"
            )
        limit = self.rollout.max_response_length
        has_memory = self.train.engine != "emulated"
        if has_memory and self.max_trained_length > self.train.max_tokens_per_gpu:
            raise ValueError(
                f"train.max_tokens_per_gpu = {self.train.max_tokens_per_gpu}: is less than one "
                f"sequence, data.max_prompt_length + rollout.max_response_length = "
                f"{self.data.max_prompt_length} + {limit}"
            )
        if self.algorithm.overlong_buffer > limit:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.algorithm.overlong_buffer}: is more than "
                f"rollout.max_response_length = {limit}"
            )
        if self.algorithm.dynamic_sampling and responses == 1:
            raise ValueError(
                "algorithm.dynamic_sampling = true: with rollout.group_size = 1 the rewards of a "
                "group are always equal, so that every group would be replaced"
            )
        return self

    @model_validator(mode="after")
    def _algorithm(self) -> Self:
        algorithm = self.algorithm
        if self.rollout.group_size == 1 and algorithm.name not in UNGROUPED:
            raise ValueError(
                f"rollout.group_size = 1: algorithm.name = {algorithm.name!r} compares the "
                "responses to a prompt with each other; raise it, or choose "
                f"{' or '.join(sorted(UNGROUPED))}"
            )
        if algorithm.name == "rloo" and algorithm.loss_norm not in (None, "sequence"):
            raise ValueError(
                f"algorithm.loss_norm = {algorithm.loss_norm!r}: to rloo a response is one action "
                "with one loss, whatever its length; leave it out"
            )
        if algorithm.overlong_penalty != 1 and not algorithm.overlong_buffer:
            raise ValueError(
                f"algorithm.overlong_penalty = {algorithm.overlong_penalty:g}: penalises nothing "
                "with algorithm.overlong_buffer = 0"
            )
        bounds = algorithm.tis_bounds
        if algorithm.old_logprobs == "rollout" and isinstance(bounds, tuple):
            raise ValueError(
                f"algorithm.tis_bounds = {list(bounds)}: with algorithm.old_logprobs = 'rollout' "
                "the ratios themselves are to what engines sampled from, and nothing is left to "
                "weigh; leave it out"
            )
        if self.tis_bounds(is_float32=False) is None:
            for key, default in (("tis_level", "token"), ("tis_mode", "truncate")):
                if (value := getattr(algorithm, key)) != default:
                    raise ValueError(
                        f"algorithm.{key} = {value!r}: there are no weights with "
                        "algorithm.tis_bounds = 'off' or algorithm.old_logprobs = 'rollout'"
                    )
        return self

    @model_validator(mode="after")
    def _lora(self) -> Self:
        lora = self.model.lora
        given: dict[str, object] = {"alpha": lora.alpha, "targets": lora.targets}
        for key, value in given.items():
            if not lora.rank and value != getattr(Lora(), key):
                raise ValueError(
                    f"model.lora.{key} = {value}: there are no adapters with model.lora.rank = 0"
                )
        if lora.rank and "emulated" in (self.train.engine, self.rollout.engine):
            which = "train" if self.train.engine == "emulated" else "rollout"
            raise ValueError(
                f"model.lora.rank = {lora.rank}: {which}.engine = 'emulated' has no model that "
                "could have adapters; leave it out"
            )
        if lora.rank and (args := sorted(LORA_ARGS.intersection(self.rollout.engine_args))):
            raise ValueError(
                f"rollout.engine_args: {args[0]}: follows from model.lora.rank = {lora.rank}; "
                "leave it out"
            )
        for target in lora.targets:
            if "," in target:
                names = [name.strip() for name in target.split(",")]
                raise ValueError(
                    f"model.lora.targets = {target!r}: is one name; several are a list: "
                    f"{json.dumps(names)}"
                )
        if lora.rank and self.weights.broadcast == "always":
            raise ValueError(
                f"weights.broadcast = 'always': with model.lora.rank = {lora.rank} a version is "
                "small and pulled by every node; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _divided(self) -> Self:
        ranks, replicas = self.train.world, self.train.replicas
        if ranks % replicas:
            raise ValueError(
                f"train.replicas = {replicas}: must divide train.nodes x train.ranks = {ranks}: "
                "each replica lies on as many ranks"
            )
        groups = self.train.prompts_per_step // self.train.mini_batches
        if replicas > groups:
            raise ValueError(
                f"train.replicas = {replicas}: each accumulates whole groups, and an update has "
                f"train.prompts_per_step / train.mini_batches = {groups} of them"
            )
        return self

    @model_validator(mode="after")
    def _devices(self) -> Self:
        for key, devices in (
            ("train.devices", self.train.devices),
            ("rollout.devices", self.rollout.devices),
        ):
            twice = [d for d in devices if devices.count(d) > 1]
            if twice:
                raise ValueError(f"{key} = {list(devices)}: names GPU {twice[0]} twice")
        if self.train.devices and len(self.train.devices) != self.train.ranks:
            raise ValueError(
                f"train.devices = {list(self.train.devices)}: one GPU for each of train.ranks = "
                f"{self.train.ranks} is needed"
            )
        if self.rollout.placement == "shared" and not self.rollout.nodes:
            raise ValueError(
                "rollout.placement = 'shared': no engine is started with rollout.nodes = 0 that "
                "could use the trainer's devices; leave it out"
            )
        size = self.gpus_per_engine
        if len(self.rollout.devices) % size:
            raise ValueError(
                f"rollout.devices = {list(self.rollout.devices)}: an engine takes {size} GPUs "
                "(tensor_parallel_size of rollout.engine_args), so a multiple of that is needed"
            )
        return self

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """All sets to evaluate on, with nothing left empty that `eval_sampling` does not say."""
        return self.eval.all_sets(self.data)

    def eval_sampling(self, one: EvalSet) -> EvalSampling:
        """How the prompts of one of `eval_sets` are answered."""
        return self.eval.sampling(one, self.rollout.max_response_length)

    @property
    def gpus_per_engine(self) -> int:
        sizes = map(
            self.rollout.engine_args.get, ("tensor_parallel_size", "pipeline_parallel_size")
        )
        return math.prod(n for n in sizes if isinstance(n, int) and n > 0)

    @property
    def device_parts(self) -> int:
        """Of the devices that sample and train in turn, how many can train without the others:
        those of each replica, if no node and no engine has devices of two of them."""
        if self.rollout.placement == "own" or self.run.deterministic:
            return 1
        return num_parts(self.train, self.rollout, self.gpus_per_engine)

    @property
    def device_parts_each(self) -> int:
        """Of these, on each trainer node."""
        return max(1, self.device_parts // self.train.nodes)

    @property
    def launched(self) -> tuple[int, int]:
        """Prompts of a short round, and responses of each."""
        prompts, responses = self.round.etas
        return round(prompts * self.train.prompts_per_step), round(
            responses * self.rollout.group_size
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    def checkpoints(self, run_dir: Path) -> Path:
        """Where they are, of a run whose directory is `run_dir` on this machine."""
        if self.checkpoint.dir:
            run_dir = Path(self.checkpoint.dir).resolve() / self.run.name
        return run_dir / CHECKPOINTS

    @property
    def reward_functions(self) -> set[str]:
        """Of all sets of prompts."""
        sets = (*self.data.all_sets, *self.eval_sets)
        return {name for one in sets for name in one.reward or self.reward.functions}

    @property
    def orders_attention(self) -> bool:
        """Whether ranks on GPUs use the deterministic backward pass of attention."""
        wanted = self.train.deterministic
        return self.run.deterministic or (self.journal.enabled if wanted == "auto" else wanted)

    @property
    def speculates(self) -> bool:
        """How much is drafted depends on the clock, and so do the shapes of batches and their
        rounding."""
        return self.speculation.enabled and not self.run.deterministic

    @property
    def deferred(self) -> Literal["restart", "continue"]:
        """`round.deferred`, or its default: how far a response had come when it was put off depends
        on time, and a deterministic run must not."""
        return self.round.deferred or ("restart" if self.run.deterministic else "continue")

    @property
    def continues(self) -> bool:
        """Responses that were put off are trained with tokens of older versions."""
        return self.round.tail_batching != "off" and self.deferred == "continue"

    @property
    def broadcast(self) -> Literal["auto", "always", "off"]:
        """`weights.broadcast` as far as it acts. An asynchronous run has other idle nodes at each
        boundary: a group would form for each version, and the trainer wait for it, while busy nodes
        that pull go on. Adapters are small: to form a group for them takes longer than a pull."""
        mode = self.weights.broadcast
        is_idle = bool(self.async_.max_staleness or self.model.lora.rank)
        return "off" if mode == "auto" and is_idle else mode

    @property
    def has_deltas(self) -> bool:
        """Whether differences between versions are found; not between adapters, which are small."""
        return self.weights.delta == "auto" and not self.model.lora.rank

    def tis_bounds(self, is_float32: bool) -> tuple[float, float] | None:
        """`algorithm.tis_bounds`, or its default; None = off. `is_float32`: the trainer computes in
        float32, and that is what it publishes. Engines that round otherwise, or sample from older
        weights, never agree with it exactly."""
        given = self.algorithm.tis_bounds
        if self.algorithm.old_logprobs == "rollout" or given == "off":
            return None  # ratios are to what engines sampled from
        if given is not None:
            return given
        is_exact = is_float32 and not ROUNDING_ARGS.intersection(self.rollout.engine_args)
        is_fresh = not self.async_.max_staleness and not self.continues
        return None if is_exact and is_fresh else DEFAULT_TIS_BOUNDS

    @property
    def max_trained_length(self) -> int:
        """Tokens of the longest prompt with the longest response that is trained."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    @property
    def max_model_length(self) -> int:
        """Tokens that an engine must have room for: an evaluation may allow more than training."""
        _, evaluated = self.eval.longest(self.rollout.max_response_length)
        return max(self.max_trained_length, self.data.max_prompt_length + evaluated)


SECTIONS = tuple(info.alias or name for name, info in Config.model_fields.items())


def keys() -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of every key, in file order: the config reference."""
    yield from _keys(Config, "")


def takes_text(key: str) -> bool:
    """Whether the value of this dotted key is text, or a list of texts."""
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
        default = (
            "(required)"
            if info.is_required()
            else json.dumps(info.get_default(call_default_factory=True))
        )
        yield f"{prefix}{name}", default, info.description or ""
        for table in get_args(kind):  # a list of tables
            if isinstance(table, type) and issubclass(table, BaseModel):
                yield from _keys(table, f"{prefix}{name}[].")
