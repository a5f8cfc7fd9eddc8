"""The run's configuration. Owns every key, default and allowed value, and which of them go
together; knows nothing of what they are used for, nor of files (run_file.py). Must stay importable
without torch.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lightrl.config_values import eta_or_pair, not_plain, one_or_many, one_or_several


class Section(BaseModel):
    # The config travels as JSON, which knows neither infinity nor NaN.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


DEFAULT_TIS_CAP = 2.0  # of asynchronous training
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]

Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(one_or_several)]

Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++"]
LossNorm = Literal["token", "sequence", "constant"]
EngineKind = Literal["auto", "vllm", "torch", "emulated"]
TrainKind = Literal["torch", "emulated"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["jsonl", "tensorboard", "wandb"]
TailBatching = Literal["off", "prompts", "both"]

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


class Run(Section):
    name: str = Field(default="run", pattern=NAME_PATTERN, description="directory below run.dir")
    dir: str = Field(default="runs", description="where run directories live")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="order of the data and noise of every sampled token"
    )
    bind: str = Field(
        default="tcp://127.0.0.1:5600", description="where the coordinator listens; port * = any"
    )
    deterministic: bool = Field(
        default=False,
        description="sum gradients in a fixed order, whatever arrived first: a run repeats bit "
        "for bit",
    )


class Model(Section):
    path: str = Field(description="HF model directory or hub id")
    dtype: Dtype = Field(
        default="auto", description="of the engines; auto = as stored on CPU, bfloat16 on GPU"
    )


class Data(Section):
    path: str = Field(description="JSONL or parquet file of prompts, or an HF datasets id")
    prompt_key: str = Field(
        default="prompt", description="column with the prompt: text or chat messages"
    )
    answer_key: str = Field(
        default="answer", description="column with the reference answer, if there is one"
    )
    max_prompt_length: Positive = Field(
        default=1024, description="tokens; a longer prompt is an error"
    )
    shuffle: bool = Field(default=True, description="a new order every epoch, from run.seed")
    system_prompt: str = Field(
        default="", description="put before chat prompts that bring no system message"
    )


class Rollout(Section):
    engine: EngineKind = Field(
        default="auto",
        description="auto = vllm where it is installed, else torch; emulated = arbitrary tokens, "
        "no model",
    )
    nodes: Annotated[int, Field(ge=0)] = Field(
        default=1, description="rollout daemons that `lightrl up` starts here"
    )
    slots: Positive = Field(
        default=64,
        le=1 << 16,  # as many as one message can name
        description="responses that run at once on a node",
    )
    group_size: Positive = Field(default=8, description="responses sampled for one prompt")
    max_response_length: Positive = Field(default=1024, description="tokens")
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 = off")
    threads: Positive = Field(default=1, description="CPU threads of one engine")
    kv_cache_gib: float = Field(
        default=0.0, ge=0, description="KV cache of a CPU engine; 0 = what slots need"
    )
    chunk_tokens: Positive = Field(
        default=16, description="tokens of a response after which a chunk is sent"
    )
    chunk_ms: Positive = Field(
        default=50, description="milliseconds after which a chunk is sent anyway"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="handed to vLLM as they are; what takes how long if emulated",
    )
    devices: Devices = Field(
        default=(),
        description="GPU indices of the engines that `lightrl up` starts; default: the next",
    )


class Optim(Section):
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, ge=0, description="maximal gradient norm; 0 = off")
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up, then constant")


class Train(Section):
    engine: TrainKind = Field(
        default="torch",
        description="emulated = nothing is learnt: weights are a digest of what was trained; "
        "for tests",
    )
    steps: Positive = Field(default=100, description="optimizer steps of the run")
    prompts_per_step: Positive = Field(
        default=32, description="groups that feed one optimizer step"
    )
    ranks: Positive = Field(default=1, description="training processes on the trainer node")
    max_tokens_per_gpu: Positive = Field(
        default=16384, description="tokens of one micro-batch on one rank"
    )
    threads: Positive = Field(default=1, description="CPU threads of one rank")
    activation_checkpointing: bool = False
    devices: Devices = Field(
        default=(), description="GPU indices, one for each rank; default: the first"
    )
    optim: Optim = Optim()


class AlgorithmSection(Section):
    name: Algorithm = "grpo"
    clip_low: float = Field(default=0.2, ge=0, description="ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(
        default=0.2, ge=0, description="ratio is clipped above at 1 + clip_high"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="0 = no reference model is loaded")
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    loss_norm: LossNorm | Positive | None = Field(
        default=None,
        description="default: what the algorithm prescribes; a number: so many tokens for each "
        "response,"
        ' as which "constant" takes rollout.max_response_length',
    )
    tis_cap: float = Field(
        default=0.0,
        ge=0,
        description="cap of the truncated importance weight; 0 = off; default 2 if "
        "async.max_staleness > 0",
    )
    overlong_buffer: int = Field(
        default=0, ge=0, description="last tokens that cost reward (DAPO); 0 = off"
    )
    dynamic_sampling: bool = Field(
        default=False,
        description="groups whose rewards are all equal are replaced by new prompts (DAPO)",
    )


class RoundSection(Section):
    tail_batching: TailBatching = Field(
        default="off",
        description="short rounds launch more prompts, or responses too, and put off the longest",
    )
    eta: Annotated[float | tuple[float, float], BeforeValidator(eta_or_pair)] = Field(
        default=1.25,
        description="launched for each one kept, 1 to 4; or a pair [prompts, responses]",
    )
    race: Literal["tokens", "clock"] = Field(
        default="tokens",
        description="what decides who is first: token counts (repeatable), or wall clock",
    )

    @property
    def etas(self) -> tuple[float, float]:
        """Prompts and responses that a short round launches for each one it keeps."""
        prompts, responses = self.eta if isinstance(self.eta, tuple) else (self.eta, self.eta)
        match self.tail_batching:
            case "off":
                return 1.0, 1.0
            case "prompts":
                return prompts, 1.0
            case "both":
                return prompts, responses


class AsyncSection(Section):
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="versions that the oldest token of a response may be behind; 0 = synchronous",
    )


class Speculation(Section):
    enabled: bool = Field(
        default=True,
        description="draft from earlier responses, exactly; off with run.deterministic",
    )
    max_window: Annotated[int, Field(ge=1, le=64)] = Field(
        default=16, description="tokens drafted at once for a response, at most"
    )
    prefer: Literal["count", "reward"] = Field(
        default="count",
        description="which continuation to draft: the most frequent, or the best rewarded",
    )
    history_mb: Positive = Field(
        default=1024, description="megabytes of earlier responses kept by the coordinator"
    )


class Reward(Section):
    functions: Names = Field(
        default=("exact_match",), description='"path.py:function" or a built-in name'
    )
    weights: tuple[float, ...] = Field(
        default=(), description="one for each function; default all 1"
    )
    workers: Positive = Field(default=1, description="reward processes")
    timeout_s: Seconds = Field(
        default=10.0, description="limit of one call, counted from its start"
    )
    env: Names = Field(
        default=(),
        description='variables that the functions need besides the usual ones; "OPENAI_*" '
        "works, too",
    )
    command: tuple[str, ...] = Field(
        default=(),
        description='put before the command line of a worker: ["bwrap", ...], ["nice", "-n", "5"]',
    )
    on_failure: float | Literal["drop"] = Field(
        default="drop",
        description="for a response without a score: drop its group, or give it this reward",
    )


class Eval(Section):
    path: str = Field(
        default="", description="held-out prompts in the layout of data.path; empty = no evaluation"
    )
    interval: int = Field(
        default=0, ge=0, description="steps between evaluations; 0 = only first and last"
    )
    samples: Positive = Field(default=1, description="responses for each prompt")
    temperature: float = Field(default=0.0, ge=0)


class Checkpoint(Section):
    interval: int = Field(
        default=20,
        ge=0,
        description="steps between checkpoints; 0 = only at the end: a trainer that dies "
        "starts over",
    )
    keep_last: Positive = Field(default=2, description="checkpoints kept")


class NodeSection(Section):
    heartbeat_s: Seconds = 0.5
    lease_s: Seconds = Field(default=3.0, description="a node silent for this long counts as lost")
    grace_s: Seconds = Field(
        default=20.0, description="how long a stopping daemon waits for its children"
    )
    patience_s: Seconds = Field(
        default=600.0,
        description="how long a node waits for its coordinator, and a run for its trainer, to "
        "come back;"
        " also how long an engine with work may be silent, and a training rank three times as long",
    )
    weights_port: int = Field(
        default=0,
        ge=0,
        lt=1 << 16,
        description="where the trainer node serves weights; 0 = any free port",
    )


class Journal(Section):
    enabled: bool = Field(default=True, description="false: the run cannot be resumed")
    flush_ms: Positive = Field(
        default=50, description="milliseconds after which an event is synced to disk"
    )
    segment_mb: Positive = Field(
        default=64, description="megabytes after which a new segment is started"
    )
    keep_history: bool = Field(
        default=False,
        description="keep all segments for `lightrl replay`, not only those a resume needs",
    )


class Logging(Section):
    backends: Annotated[tuple[Backend, ...], BeforeValidator(one_or_many)] = ("jsonl",)


class Config(Section):
    run: Run = Run()
    model: Model
    data: Data
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
    journal: Journal = Journal()
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _weigh_stale_tokens(cls, tree: Any) -> Any:
        """Asynchronous training has importance weights unless they are refused by name."""
        if not isinstance(tree, dict):
            return tree
        sections = cast("dict[str, Any]", tree)
        asynchronous, algorithm = sections.get("async"), sections.get("algorithm", {})
        if not isinstance(asynchronous, dict) or not isinstance(algorithm, dict):
            return sections
        if cast("dict[str, Any]", asynchronous).get("max_staleness", 0) in (0, "0"):
            return sections
        return {
            **sections,
            "algorithm": {"tis_cap": DEFAULT_TIS_CAP, **cast("dict[str, Any]", algorithm)},
        }

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
        weights, functions = self.reward.weights, self.reward.functions
        if weights and len(weights) != len(functions):
            raise ValueError(
                f"reward.weights: {len(weights)} weights for {len(functions)} reward.functions"
            )
        if not functions:
            raise ValueError("reward.functions: at least one is needed")
        if self.node.lease_s < 2 * self.node.heartbeat_s:
            raise ValueError(
                f"node.lease_s = {self.node.lease_s}: must be at least twice "
                f"node.heartbeat_s = {self.node.heartbeat_s}, or healthy nodes are lost"
            )
        return self

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        prompts, responses = self.train.prompts_per_step, self.rollout.group_size
        mode = self.round.tail_batching
        if mode != "off" and self.launched == (prompts, responses):
            raise ValueError(
                f"round.eta = {self.round.eta}: with round.tail_batching = {mode!r} this "
                "over-provisions "
                f"nothing: {prompts} prompts x {responses} responses are needed and "
                "launched; raise it"
            )
        if self.train.engine == "emulated" and self.rollout.engine != "emulated":
            raise ValueError(
                f"rollout.engine = {self.rollout.engine!r}: only 'emulated' can load what "
                "train.engine = 'emulated' publishes, which is no model"
            )
        if self.async_.max_staleness and not self.algorithm.tis_cap:
            raise ValueError(
                f"algorithm.tis_cap = 0: async.max_staleness = {self.async_.max_staleness} "
                "trains tokens of "
                "older versions, which is biased without importance weights; leave it out"
            )
        limit = self.rollout.max_response_length
        if self.algorithm.overlong_buffer > limit:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.algorithm.overlong_buffer}: is more than "
                f"rollout.max_response_length = {limit}"
            )
        if self.algorithm.dynamic_sampling and (responses == 1 or self.rollout.temperature == 0):
            equal = f"group_size = {responses}" if responses == 1 else "temperature = 0"
            raise ValueError(
                f"algorithm.dynamic_sampling = true: with rollout.{equal} the rewards of a "
                "group are always "
                "equal, so that every group would be replaced"
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
        size = self.gpus_per_engine
        if len(self.rollout.devices) % size:
            raise ValueError(
                f"rollout.devices = {list(self.rollout.devices)}: an engine takes {size} GPUs "
                "(tensor_parallel_size of rollout.engine_args), so a multiple of that is needed"
            )
        return self

    @property
    def gpus_per_engine(self) -> int:
        sizes = map(
            self.rollout.engine_args.get, ("tensor_parallel_size", "pipeline_parallel_size")
        )
        return math.prod(n for n in sizes if isinstance(n, int) and n > 0)

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

    @property
    def speculates(self) -> bool:
        """How much is drafted depends on the clock, and so do the shapes of batches and their
        rounding."""
        return self.speculation.enabled and not self.run.deterministic

    @property
    def max_model_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_length + self.rollout.max_response_length


SECTIONS = tuple(info.alias or name for name, info in Config.model_fields.items())


def keys() -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of every key, in file order: the config reference."""
    yield from _keys(Config, "")


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for attribute, info in section.model_fields.items():
        kind, name = info.annotation, info.alias or attribute
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            default = (
                "(required)"
                if info.is_required()
                else json.dumps(info.get_default(call_default_factory=True))
            )
            yield f"{prefix}{name}", default, info.description or ""
