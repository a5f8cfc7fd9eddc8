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
from lightrl.config.parallel import num_parts, why_no_sizes
from lightrl.config.reward import (
    LONGEST_TEST_S,
    OF_OWN_FUNCTIONS,
    Reward,
    is_own_function,
    with_environment,
)
from lightrl.config.scale import Offload, Prices, ScaleSection
from lightrl.config.sections import (
    AsyncSection,
    Checkpoint,
    Journal,
    Lora,
    Model,
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
        for rules in RULES:
            for key, why in rules(self):
                raise ValueError(f"{self.key_value(key)}: {why}")
        return self

    def key_value(self, key: str) -> str:
        """A dotted key with its value, as in messages. Example: "train.ranks = 2"."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, "async_" if part == "async" else part)
        if isinstance(value, dict) or value == "":
            return key
        text = f"{value:g}" if isinstance(value, float) else repr(value)
        if isinstance(value, tuple):
            text = repr(list(cast("tuple[Any, ...]", value)))
        return f"{key} = {str(value).lower() if isinstance(value, bool) else text}"

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """All sets to evaluate on, with the defaults of all keys but those of `eval_sampling`."""
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


Conflicts = Iterator[tuple[str, str]]  # a key, and why its value is refused


def _general(c: Config) -> Conflicts:
    if c.run.name == "latest":
        yield "run.name", "is the link to the newest run; choose another name"
    if problem := not_plain(c.rollout.engine_args):
        yield "rollout.engine_args", problem
    if c.rollout.engine_args.get("trust_remote_code"):
        yield (
            "rollout.engine_args",
            "trust_remote_code: LightRL runs no code of a model directory",
        )
    if c.node.lease_s < 2 * c.node.heartbeat_s:
        needed = f"twice node.heartbeat_s = {c.node.heartbeat_s:g}"
        yield "node.lease_s", f"must be at least {needed}, or healthy nodes are lost"
    if not c.data.all_sets and not c.eval.checkpoint:
        yield "data.path", "is required, or at least one [[data.sets]]"
    if problem := not_plain(c.data.chat_template_kwargs):
        yield "data.chat_template_kwargs", problem
    if not all(c.rollout.stop):
        yield "rollout.stop", "an empty text is in every text; leave it out"
    if c.train.engine == "emulated" and c.rollout.engine != "emulated":
        published = "what train.engine = 'emulated' publishes, which is no model"
        yield "rollout.engine", f"only 'emulated' can load {published}"
    if c.weights.broadcast == "always" and c.rollout.engine == "emulated":
        why = "rollout.engine = 'emulated' has no memory to receive weights in"
        yield "weights.broadcast", f"{why}; leave it out"
    interval = c.checkpoint.interval
    if c.checkpoint.keep_every and (not interval or c.checkpoint.keep_every % interval):
        yield "checkpoint.keep_every", f"must be a multiple of checkpoint.interval = {interval}"


def _shared_devices(c: Config) -> Conflicts:
    """Devices that sample and train, or those of engines of several sizes."""
    ahead = c.async_.max_staleness
    if problem := why_no_sizes(c.rollout, ahead, c.run.deterministic):
        yield "rollout.parallel", problem
    if ahead and c.rollout.placement == "shared":
        yield (
            "rollout.placement",
            f"with async.max_staleness = {ahead} nodes sample while the trainer trains, and both "
            "need the devices; leave one of them out",
        )
    if c.offload.rule != "foreseen" and c.rollout.placement == "own":
        yield "offload.rule", "acts on rollout.placement = 'shared' only; leave it out"
    if c.rollout.placement == "shared" and not c.rollout.nodes:
        yield "rollout.placement", "rollout.nodes = 0 starts no engine that could use the devices"


def _rounds(c: Config) -> Conflicts:
    prompts, responses, limit = c.train.prompts_per_step, c.rollout.group_size, c.max_trained_length
    if c.round.tail_batching != "off" and c.launched == (prompts, responses):
        yield (
            "round.eta",
            f"over-provisions nothing: {prompts} prompts x {responses} responses are needed and "
            "launched; raise it",
        )
    if c.train.engine != "emulated" and limit > c.train.max_tokens_per_gpu:
        yield (
            "train.max_tokens_per_gpu",
            "is less than one sequence, data.max_prompt_length + rollout.max_response_length = "
            f"{c.data.max_prompt_length} + {c.rollout.max_response_length}",
        )
    if c.algorithm.overlong_buffer > c.rollout.max_response_length:
        most = f"rollout.max_response_length = {c.rollout.max_response_length}"
        yield "algorithm.overlong_buffer", f"is more than {most}"
    if c.algorithm.dynamic_sampling and responses == 1:
        yield (
            "algorithm.dynamic_sampling",
            "with rollout.group_size = 1 the rewards of a group are always equal, so that every "
            "group would be replaced",
        )


def _algorithm(c: Config) -> Conflicts:
    algorithm, bounds, ahead = c.algorithm, c.algorithm.tis_bounds, c.async_.max_staleness
    if bounds == "off" and algorithm.old_logprobs == "trainer" and (c.continues or ahead):
        what = f"async.max_staleness = {ahead} trains" if ahead else "deferred responses have"
        leave = "leave it out" if ahead else "leave it out, or set round.deferred = 'restart'"
        biased = "tokens of older versions, which is biased without importance weights"
        yield "algorithm.tis_bounds", f"{what} {biased}; {leave}"
    if c.rollout.group_size == 1 and algorithm.name not in UNGROUPED:
        yield (
            "rollout.group_size",
            f"algorithm.name = {algorithm.name!r} compares the responses to a prompt with each "
            f"other; raise it, or choose {' or '.join(sorted(UNGROUPED))}",
        )
    if algorithm.name == "rloo" and algorithm.loss_norm not in (None, "sequence"):
        yield (
            "algorithm.loss_norm",
            "to rloo a response is one action with one loss, whatever its length; leave it out",
        )
    if algorithm.overlong_penalty != 1 and not algorithm.overlong_buffer:
        yield "algorithm.overlong_penalty", "penalises nothing with algorithm.overlong_buffer = 0"
    if algorithm.old_logprobs == "rollout" and isinstance(bounds, tuple):
        yield (
            "algorithm.tis_bounds",
            "with algorithm.old_logprobs = 'rollout' the ratios themselves are to what engines "
            "sampled from, and nothing is left to weigh; leave it out",
        )
    if c.tis_bounds(is_float32=False) is None:
        off = "algorithm.tis_bounds = 'off' or algorithm.old_logprobs = 'rollout'"
        for key, default in (("tis_level", "token"), ("tis_mode", "truncate")):
            if getattr(algorithm, key) != default:
                yield f"algorithm.{key}", f"there are no weights with {off}"


def _lora(c: Config) -> Conflicts:
    lora = c.model.lora
    for key in ("alpha", "targets"):
        if not lora.rank and getattr(lora, key) != getattr(Lora(), key):
            yield f"model.lora.{key}", "there are no adapters with model.lora.rank = 0"
    for target in lora.targets:
        if "," in target:
            names = json.dumps([name.strip() for name in target.split(",")])
            yield "model.lora.targets", f"{target!r} is one name; several are a list: {names}"
    if not lora.rank:
        return
    if "emulated" in (c.train.engine, c.rollout.engine):
        which = "train" if c.train.engine == "emulated" else "rollout"
        why = f"{which}.engine = 'emulated' has no model that could have adapters"
        yield "model.lora.rank", f"{why}; leave it out"
    for key in sorted(LORA_ARGS.intersection(c.rollout.engine_args)):
        yield (
            "rollout.engine_args",
            f"{key}: follows from {c.key_value('model.lora.rank')}; leave it out",
        )
    if c.weights.broadcast == "always":
        small = f"with {c.key_value('model.lora.rank')} a version is small and pulled by every node"
        yield "weights.broadcast", f"{small}; leave it out"


def _devices(c: Config) -> Conflicts:
    train, groups = c.train, c.train.prompts_per_step // c.train.mini_batches
    if train.world % train.replicas:
        ranks = f"train.nodes x train.ranks = {train.world}"
        yield "train.replicas", f"must divide {ranks}: each replica lies on as many ranks"
    if train.replicas > groups:
        yield (
            "train.replicas",
            "each accumulates whole groups, and an update has train.prompts_per_step / "
            f"train.mini_batches = {groups} of them",
        )
    for key in ("train", "rollout"):
        devices: tuple[int, ...] = getattr(c, key).devices
        if twice := [d for d in devices if devices.count(d) > 1]:
            yield f"{key}.devices", f"names GPU {twice[0]} twice"
    if train.devices and len(train.devices) != train.ranks:
        yield "train.devices", f"one GPU for each of train.ranks = {train.ranks} is needed"
    if len(c.rollout.devices) % (size := c.gpus_per_engine):
        engine = f"an engine takes {size} GPUs (tensor_parallel_size of rollout.engine_args)"
        yield "rollout.devices", f"{engine}, so a multiple of that is needed"


def _rewards(c: Config) -> Conflicts:
    reward, functions, defaults = c.reward, c.reward_functions, Reward()
    if reward.weights and len(reward.weights) != len(reward.functions):
        num = f"{len(reward.weights)} weights for {len(reward.functions)}"
        yield "reward.weights", f"{num} reward.functions"
    if not reward.functions:
        yield "reward.functions", "at least one is needed"
    for key in OF_OWN_FUNCTIONS:
        is_given = getattr(reward, key) != getattr(defaults, key)
        if is_given and not any(map(is_own_function, functions)):
            own = 'and no "path.py:function" is among reward.functions'
            yield f"reward.{key}", f"is for functions of your own, {own}"
    if problem := not_plain(reward.kwargs):
        yield "reward.kwargs", problem
    if "regex" in functions and not reward.regex:
        compared = "its first group is compared with the answer"
        yield "reward.regex", f"is needed for the reward 'regex', e.g. '#### (.+)': {compared}"
    if "code" in functions and reward.timeout_s < LONGEST_TEST_S:
        yield (
            "reward.timeout_s",
            f'a single test of the reward "code" may take {LONGEST_TEST_S:g} s, and all tests of a '
            "response count: set it to 60 or more",
        )
    if "judge" in functions and not (reward.judge.url and reward.judge.model):
        yield "reward.functions", '"judge" needs reward.judge.url and reward.judge.model'
    if "judge" in functions and reward.judge.concurrency < reward.workers:
        workers = c.key_value("reward.workers")
        yield (
            "reward.judge.concurrency",
            f"is less than {workers}, each of which makes a call at a time",
        )
    for name in ("code", "judge"):
        section: Section = getattr(reward, name)
        for key, value in section:
            if name not in functions and value != getattr(getattr(defaults, name), key):
                yield f"reward.{name}.{key}", f'cannot act without "{name}" in reward.functions'


def _cost(c: Config) -> Conflicts:
    prices, scale = c.prices, c.scale
    for key, other in (
        ("reserved_per_hour", "preemptible_per_hour"),
        ("preemptible_per_hour", "reserved_per_hour"),
    ):
        if getattr(prices, key) is not None and getattr(prices, other) is None:
            yield (
                f"prices.{key}",
                f"no cost is known without prices.{other}; give it, too (0 = free)",
            )
    for key in ("command", "drain"):
        if getattr(scale, key) and not scale.max:
            yield f"scale.{key}", "no number of nodes is ever wanted with scale.max = 0; raise it"
    for key in ("every_s", "timeout_s"):
        if getattr(scale, key) != getattr(ScaleSection(), key) and not scale.command:
            yield f"scale.{key}", "there is no scale.command to run"
    if scale.max and not (scale.command or scale.drain):
        yield "scale.max", "has no effect without scale.command or scale.drain"


RULES = (_general, _shared_devices, _rounds, _algorithm, _lora, _devices, _rewards, _cost)


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
