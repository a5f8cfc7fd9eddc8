"""The sections of a run's config: every key with its default, meaning and allowed values.

Owns single keys; which of their values go together is in schema.py. The section of the algorithm
is in algorithm.py. Must stay importable without torch.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lightrl.config.values import eta_or_pair, expanded, not_greedy, one_or_many, one_or_several


class Section(BaseModel):
    # The config travels as JSON, which has neither infinity nor NaN.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


MAX_SLOTS = 1 << 16  # as many as one message can name
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Place = Annotated[str, AfterValidator(expanded)]  # a path
Names = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]

Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(one_or_several)]

EngineKind = Literal["auto", "vllm", "torch", "emulated"]
TrainKind = Literal["torch", "emulated"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TailBatching = Literal["off", "prompts", "both"]


class Run(Section):
    name: str = Field(default="run", pattern=NAME_PATTERN, description="directory below run.dir")
    dir: Place = Field(default="runs", description="where run directories live")
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


class Lora(Section):
    rank: int = Field(
        default=0,
        ge=0,
        le=512,  # the largest that vLLM serves
        description="of the adapters that are trained in place of the model; 0 = it is itself",
    )
    alpha: float = Field(
        default=32.0, gt=0, description="what adapters add is scaled by alpha / rank"
    )
    targets: Names = Field(
        default=(),
        description="linear layers that get one, by the ends of their names; default: all but "
        "the head",
    )


class Model(Section):
    path: str = Field(description="HF model directory or hub id")
    dtype: Dtype = Field(
        default="auto",
        description="of the engines and of what is published for them; auto = as stored on "
        "CPU, bfloat16 on GPU",
    )

    lora: Lora = Lora()


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
        le=MAX_SLOTS,
        description="responses that run at once on a node",
    )
    group_size: Positive = Field(default=8, description="responses sampled for one prompt")
    max_response_length: Positive = Field(default=1024, description="tokens")
    temperature: Annotated[float, BeforeValidator(not_greedy)] = Field(
        default=1.0, gt=0, description="of sampling"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling; 1 = off")
    top_k: int = Field(
        default=0,
        ge=0,
        description="0 = off; logprobs are those of the whole distribution, also with top_p",
    )
    stop: Names = Field(
        default=(),
        description="texts that end a response, beside the model's stop tokens; it keeps the token "
        "that completes one",
    )
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
        description="passed to vLLM unchanged; for the emulated engine how long its work takes",
    )
    devices: Devices = Field(
        default=(),
        description="GPU indices of the engines that `lightrl up` starts; default: the next",
    )
    placement: Literal["own", "shared"] = Field(
        default="own",
        description="shared = the engines that `lightrl up` and the trainers' Slurm jobs start use "
        "the trainer's devices, in turn with it",
    )
    parallel: tuple[Positive, ...] = Field(
        default=(),
        description="tensor parallel sizes, smallest first: rollout.nodes engines of the first "
        "and larger ones over the same GPUs take turns between rounds; default: one size",
    )


class Optim(Section):
    name: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="adamw8bit keeps its moments in 8 bits, by torchao: 2 bytes a parameter and "
        "not 8",
    )
    lr: float = Field(
        default=1e-6,
        gt=0,
        le=1,  # AdamW moves every weight by about as much in one update
        description="learning rate of AdamW; about 1e-6 for a model, 1e-5 to 1e-4 for adapters",
    )
    betas: tuple[Share, Share] = Field(default=(0.9, 0.95), description="of AdamW")
    eps: float = Field(default=1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    grad_clip: float = Field(default=1.0, ge=0, description="maximal gradient norm; 0 = off")
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up, then the schedule")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="of the learning rate from warm-up to the last of train.steps",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="of lr, where a linear or cosine schedule ends"
    )


class Train(Section):
    engine: TrainKind = Field(
        default="torch",
        description="emulated = nothing is learnt: weights are a digest of what was trained; "
        "for tests",
    )
    steps: Positive = Field(
        default=100, description="steps of the run; each has train.mini_batches updates"
    )
    prompts_per_step: Positive = Field(
        default=32, description="groups of one step, which ends with a new version"
    )
    mini_batches: Positive = Field(
        default=1,
        description="updates of one step, each with as many of its groups; must divide "
        "train.prompts_per_step",
    )
    mini_batch_order: Literal["random", "arrival"] = Field(
        default="random",
        description="which groups of a step an update has: any, by run.seed and the step; or those "
        "that are complete first, which are the shortest: more of the backward pass overlaps with "
        "generation, but long responses are always trained last",
    )
    nodes: Positive = Field(
        default=1,
        le=4096,
        description="trainer daemons that train together; `lightrl up` starts all of them here",
    )
    ranks: Positive = Field(default=1, description="training processes on each trainer node")
    max_tokens_per_gpu: Positive = Field(
        default=16384,
        description="tokens of one micro-batch on one rank; while a round runs, groups wait until "
        "they fill one on every rank",
    )
    threads: Positive = Field(default=1, description="CPU threads of one rank")
    activation_checkpointing: bool | Literal["auto"] = Field(
        default="auto", description="less memory, slower; auto = on GPUs"
    )
    deterministic: bool | Literal["auto"] = Field(
        default="auto",
        description="on GPUs, sum the gradients of attention in a fixed order, which is slower: a "
        "step that is trained again after a restart then gives the same weights; auto = if "
        "journal.enabled; run.deterministic includes it",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none",
        description="to the memory of the host: the optimizer's state, or weights and gradients "
        "too; less GPU memory, slower",
    )
    replicas: Positive = Field(
        default=1,
        description="copies of the model; each is divided among ranks / replicas, and accumulates "
        "whole groups of its own: less traffic, no waiting for each other, more memory",
    )
    sync: Literal["auto", "each", "last"] = Field(
        default="auto",
        description="gradients are summed over the ranks of a replica with each micro-batch, or "
        "once an update: less traffic, but each rank holds those of the whole model; auto = each "
        "on GPUs, last on CPUs, where each rank then holds all weights during a step, too",
    )
    devices: Devices = Field(
        default=(), description="GPU indices, one for each rank of a node; default: the first"
    )
    optim: Optim = Optim()

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> Self:
        prompts, num = self.prompts_per_step, self.mini_batches
        if prompts % num:
            raise ValueError(
                f"train.mini_batches = {num}: must divide train.prompts_per_step = {prompts}"
            )
        return self

    @property
    def world(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks


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

    deferred: Literal["restart", "continue"] | None = Field(
        default=None,
        description="what a later round does with responses that were put off: it continues them "
        "from their tokens, which are of older versions then, or restarts them, on-policy, which "
        "makes them shorter; default: continue, with run.deterministic restart",
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


class Checkpoint(Section):
    interval: int = Field(
        default=20,
        ge=0,
        description="steps between checkpoints; 0 = only at the end: a trainer that dies "
        "starts over",
    )
    dir: str = Field(
        default="",
        description="a folder that all trainer nodes see, for checkpoints/ in a folder of the "
        "run's name; default: run.dir",
    )
    initial_load_path: str = Field(
        default="",
        description="another run, or a checkpoint of one, with whose weights, optimizer and "
        "schedule this run begins (`lightrl up --from`); empty = with model.path",
    )
    keep_last: Positive = Field(default=2, description="newest checkpoints kept")
    keep_every: int = Field(
        default=0,
        ge=0,
        description="steps between checkpoints that are kept for good, beside keep_last; 0 = none",
    )
    export: Literal["last", "every", "never"] = Field(
        default="last",
        description="the checkpoint of the last step, every one (training waits for it before the "
        "next) or none gets a Hugging Face model directory; `lightrl export` makes one of any",
    )
    shard_mb: Positive = Field(
        default=2000, description="megabytes of a file of safetensors in an export"
    )


class NodeSection(Section):
    heartbeat_s: Seconds = Field(default=0.5, description="between two signs of life of a node")
    lease_s: Seconds = Field(default=3.0, description="a node silent for this long counts as lost")
    grace_s: Seconds = Field(
        default=20.0, description="how long a stopping daemon waits for its children"
    )
    patience_s: Seconds = Field(
        default=600.0,
        description="how long a node waits for its coordinator, and a run for its trainer, to "
        "come back; also how long an engine with work may be silent, or one still start whose "
        "devices others wait for, and a training rank three times as long",
    )
    weights_port: int = Field(
        default=0,
        ge=0,
        lt=1 << 16,
        description="where the trainer node serves weights; 0 = any free port",
    )


class Weights(Section):
    addresses: Names = Field(
        default=(),
        description="hosts on which each node serves weights, one for each network card; default: "
        "the one by which it reaches the coordinator",
    )
    streams: Positive = Field(
        default=4, le=16, description="connections of a node that pulls a version"
    )
    timeout_s: Seconds = Field(
        default=60.0, description="without a byte, after which a transfer has failed"
    )
    canary: NotNegative | None = Field(
        default=None,
        description="a node whose logprobs of a fixed text differ by more from the trainer's is "
        "not used; 0 = no such check; default: what rounding explains in the engine's dtype",
    )
    delta: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: nodes that have the version before get the difference, where that is "
        "smaller; off: always the whole version",
    )
    broadcast: Literal["auto", "always", "off"] = Field(
        default="auto",
        description="auto: new weights are broadcast to all idle nodes of other machines that "
        "are not preemptible, unless the run is asynchronous; always: to busy nodes and those of "
        "the trainer's machine, too; off: every node pulls them",
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
