"""The sections of a run's config: every key with its default and its allowed values. The text below
a key is its meaning in `lightrl config`.

The rules on several keys are in rules.py. Must stay importable without torch.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lightrl.config.values import eta_or_pair, expanded, not_greedy, one_or_many, one_or_several


class Section(BaseModel):
    # Nodes get the config as JSON, which has neither infinity nor NaN.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )


MAX_SLOTS = 1 << 16  # as many as one message can name
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Place = Annotated[str, AfterValidator(expanded)]  # a path
Names = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]

Devices = Annotated[tuple[Count, ...], BeforeValidator(one_or_several)]

EngineKind = Literal["auto", "vllm", "torch", "emulated"]
TrainKind = Literal["torch", "emulated"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TailBatching = Literal["off", "prompts", "both"]


class Run(Section):
    name: str = Field(default="run", pattern=NAME_PATTERN)
    """directory below run.dir"""
    dir: Place = "runs"
    """where run directories live"""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """order of the data and noise of every sampled token"""
    bind: str = "tcp://127.0.0.1:5600"
    """where the coordinator listens; port * = any"""
    deterministic: bool = False
    """sum gradients in a fixed order, whatever arrived first: a run repeats bit for bit"""


class Lora(Section):
    rank: int = Field(default=0, ge=0, le=512)  # vLLM serves no larger ones
    """of the adapters that are trained in place of the model; 0 = it is itself"""
    alpha: float = Field(default=32.0, gt=0)
    """what adapters add is scaled by alpha / rank"""
    targets: Names = ()
    """linear layers that get one, by the ends of their names; default: all but the head"""


class Model(Section):
    path: str
    """HF model directory or hub id"""
    dtype: Dtype = "auto"
    """of the engines and of what is published for them; auto = bfloat16 on GPU; on CPU as stored,
    or float32 where a run starts on a CPU without instructions for bfloat16"""

    lora: Lora = Lora()


class Rollout(Section):
    engine: EngineKind = "auto"
    """auto = vllm where it is installed, else torch; emulated = arbitrary tokens, no model"""
    nodes: Count = 1
    """rollout daemons that `lightrl up` starts here"""
    slots: Positive = Field(default=64, le=MAX_SLOTS)
    """concurrent responses on a node"""
    group_size: Positive = 8
    """responses sampled for one prompt"""
    max_response_length: Positive = 1024
    """tokens"""
    temperature: Annotated[float, BeforeValidator(not_greedy)] = Field(default=1.0, gt=0)
    """of sampling"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """nucleus sampling; 1 = off"""
    top_k: Count = 0
    """0 = off; logprobs are those of the whole distribution, also with top_p"""
    stop: Names = ()
    """texts that end a response, beside the model's stop tokens; it keeps the token that completes
    one"""
    threads: Positive = 1
    """CPU threads of one engine"""
    kv_cache_gib: NotNegative = 0.0
    """KV cache of a CPU engine; 0 = what slots need"""
    chunk_tokens: Positive = 16
    """tokens of a response after which a chunk is sent"""
    chunk_ms: Positive = 50
    """milliseconds after which a chunk is sent anyway"""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """passed to vLLM unchanged; for the emulated engine how long its work takes"""
    devices: Devices = ()
    """GPU indices of the engines that `lightrl up` starts; default: the next"""
    placement: Literal["own", "shared"] = "own"
    """shared = the engines that `lightrl up` and the trainers' Slurm jobs start use the trainer's
    devices, in turn with it"""
    parallel: tuple[Positive, ...] = ()
    """tensor parallel sizes, smallest first: rollout.nodes engines of the first and larger ones
    over the same GPUs take turns between rounds; default: one size"""


class Optim(Section):
    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit keeps its moments in 8 bits, by torchao: 2 bytes a parameter and not 8"""
    lr: float = Field(default=1e-6, gt=0, le=1)
    """learning rate of AdamW; about 1e-6 for a model, 1e-5 to 1e-4 for adapters"""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """of AdamW"""
    eps: float = Field(default=1e-8, gt=0)
    """of AdamW"""
    weight_decay: NotNegative = 0.0
    """of AdamW"""
    grad_clip: NotNegative = 1.0
    """maximal gradient norm; 0 = off"""
    warmup_steps: Count = 0
    """linear warm-up, then the schedule"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """of the learning rate from warm-up to the last of train.steps"""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """of lr, where a linear or cosine schedule ends"""


class Train(Section):
    engine: TrainKind = "torch"
    """emulated = nothing is learnt: weights are a digest of what was trained; for tests"""
    steps: Positive = 100
    """steps of the run; each has train.mini_batches updates"""
    prompts_per_step: Positive = 32
    """groups of one step, which ends with a new version"""
    mini_batches: Positive = 1
    """updates of one step, each with as many of its groups; must divide train.prompts_per_step"""
    mini_batch_order: Literal["random", "arrival"] = "random"
    """which groups of a step an update has: any, by run.seed and the step; or those that are
    complete first, which are the shortest: more of the backward pass overlaps with generation, but
    long responses are always trained last"""
    nodes: Positive = Field(default=1, le=4096)
    """trainer daemons that train together; `lightrl up` starts all of them here"""
    ranks: Positive = 1
    """training processes on each trainer node"""
    max_tokens_per_gpu: Positive = 16384
    """tokens of one micro-batch on one rank; while a round runs, groups wait until they fill one on
    every rank"""
    threads: Positive = 1
    """CPU threads of one rank"""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """less memory, slower; auto = on GPUs"""
    deterministic: bool | Literal["auto"] = "auto"
    """on GPUs, sum the gradients of attention in a fixed order, which is slower: a step that is
    trained again after a restart then gives the same weights; auto = if journal.enabled;
    run.deterministic includes it"""
    offload: Literal["none", "optimizer", "all"] = "none"
    """to the memory of the host: the optimizer's state, or weights and gradients too; less GPU
    memory, slower"""
    replicas: Positive = 1
    """copies of the model; each is divided among ranks / replicas, and accumulates whole groups of
    its own: less traffic, no waiting for each other, more memory"""
    sync: Literal["auto", "each", "last"] = "auto"
    """gradients are summed over the ranks of a replica with each micro-batch, or once an update:
    less traffic, but each rank holds those of the whole model; auto = each on GPUs, last on CPUs,
    where each rank then holds all weights during a step, too"""
    devices: Devices = ()
    """GPU indices, one for each rank of a node; default: the first"""
    optim: Optim = Optim()

    @property
    def world(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks


class RoundSection(Section):
    tail_batching: TailBatching = "off"
    """short rounds launch more prompts, or responses too, and put off the longest"""
    eta: Annotated[float | tuple[float, float], BeforeValidator(eta_or_pair)] = 1.25
    """launched for each one kept, 1 to 4; or a pair [prompts, responses]"""
    race: Literal["tokens", "clock"] = "tokens"
    """what decides who is first: token counts (repeatable), or wall clock"""

    deferred: Literal["restart", "continue"] | None = None
    """what a later round does with responses that were put off: it continues them from their
    tokens, which are of older versions then, or restarts them, on-policy, which makes them shorter;
    default: continue, with run.deterministic restart"""

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
    max_staleness: Count = 0
    """versions that the oldest token of a response may be behind; 0 = synchronous"""


class Speculation(Section):
    enabled: bool = True
    """draft from earlier responses, exactly; off with run.deterministic"""
    max_window: Annotated[int, Field(ge=1, le=64)] = 16
    """tokens drafted for one engine step of a response, at most"""
    prefer: Literal["count", "reward"] = "count"
    """which continuation to draft: the most frequent, or the best rewarded"""
    history_mb: Positive = 1024
    """megabytes of earlier responses kept by the coordinator"""


class Checkpoint(Section):
    interval: Count = 20
    """steps between checkpoints; 0 = only at the end: a trainer that dies starts over"""
    dir: str = ""
    """a folder that all trainer nodes see, for checkpoints/ in a folder of the run's name; default:
    run.dir"""
    initial_load_path: str = ""
    """another run, or a checkpoint of one, with whose weights, optimizer and schedule this run
    begins (`lightrl up --from`); empty = with model.path"""
    keep_last: Positive = 2
    """newest checkpoints kept"""
    keep_every: Count = 0
    """steps between checkpoints that are kept for good, beside keep_last; 0 = none"""
    export: Literal["last", "every", "never"] = "last"
    """the checkpoint of the last step, every one (training waits for it before the next) or none
    gets a Hugging Face model directory; `lightrl export` makes one of any"""
    shard_mb: Positive = 2000
    """megabytes of a file of safetensors in an export"""


class NodeSection(Section):
    heartbeat_s: Seconds = 0.5
    """between two signs of life of a node"""
    lease_s: Seconds = 3.0
    """a node silent for this long counts as lost"""
    grace_s: Seconds = 20.0
    """how long a stopping daemon waits for its children"""
    patience_s: Seconds = 600.0
    """how long a node waits for its coordinator, and a run for its trainer, to come back; also the
    longest silence of an engine with work, the longest start of an engine whose devices others wait
    for, and a third of the longest silence of a training rank"""
    weights_port: int = Field(default=0, ge=0, lt=1 << 16)
    """where the trainer node serves weights; 0 = any free port"""


class Weights(Section):
    addresses: Names = ()
    """hosts on which each node serves weights, one for each network card; default: the one by which
    it reaches the coordinator"""
    streams: Positive = Field(default=4, le=16)
    """connections of a node that pulls a version"""
    timeout_s: Seconds = 60.0
    """without a byte, after which a transfer has failed"""
    canary: NotNegative | None = None
    """a node whose logprobs of a fixed text differ by more from the trainer's is not used; 0 = no
    such check; default: what rounding explains in the engine's dtype"""
    delta: Literal["auto", "off"] = "auto"
    """auto: nodes that have the version before get the difference, where that is smaller; off:
    always the whole version"""
    broadcast: Literal["auto", "always", "off"] = "auto"
    """auto: new weights are broadcast to all idle nodes of other machines that are not preemptible,
    unless the run is asynchronous; always: to busy nodes and those of the trainer's machine, too;
    off: every node pulls them"""


class Journal(Section):
    enabled: bool = True
    """false: the run cannot be resumed"""
    flush_ms: Positive = 50
    """milliseconds after which an event is synced to disk"""
    segment_mb: Positive = 64
    """megabytes after which a new segment is started"""
    keep_history: bool = False
    """keep all segments for `lightrl replay`, not only those a resume needs"""
