"""The protocol of every rollout engine, and the messages between a daemon and its engine process.

An engine is synchronous and lives in a child process of the rollout daemon (`engine/process.py`
drives it), so that a forward pass never blocks an event loop and a crash is an event. Must not
import torch or vllm.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from lightrl.messages.fields import Name, Tokens
from lightrl.messages.load import Load
from lightrl.messages.responses import (
    Abort,
    FinishReason,
    Generate,
    PromptHistory,
    ResponseRequest,
    Sampling,
    TokenChunk,
)
from lightrl.messages.weights import Canary
from lightrl.weights.broadcast.membership import IsUnwanted, Membership
from lightrl.weights.version.manifest import VersionFile

Kind: TypeAlias = Literal["vllm", "torch", "emulated"]


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Adapters, from `model.lora` of the config. Example: LoraSpec(16, 32.0, ("q_proj",))."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to build an engine; the first command of its process.

    `model_dir` holds config.json; weights there are not read: the engine starts with arbitrary ones
    and serves nothing before its first LoadWeights.
    """

    kind: Kind
    model_dir: str
    # "auto", "float32", ...
    dtype: str
    # tokens, prompt + response
    max_model_length: int
    # responses that may run concurrently
    slots: int
    # 0 = what `slots` sequences of max_model_length need
    kv_cache_gib: float = 0.0
    chunk_tokens: int = 16
    chunk_ms: int = 50
    engine_args: dict[str, Any] = field(default_factory=dict)
    # drafted tokens that are verified together for a response; 0 = no speculation
    max_window: int = 0
    # of several continuations the frequent or the rewarded one
    prefer: Literal["count", "reward"] = "count"
    # share of each of its GPUs that it may take; 0 = as it comes
    gpu_memory: float = 0.0
    # the same tokens whatever runs beside them, at the price of speed
    is_deterministic: bool = False
    # largest difference of a logprob of a version's canary; None = by dtype
    canary: float | None = None
    # versions are adapters, each beside the same base
    lora: LoraSpec | None = None
    # training ranks, or engines of other sizes, use its devices in turn with it: it can sleep
    can_sleep: bool = False
    # texts that end a response, beside the stop tokens
    stop: tuple[str, ...] = ()
    # devices that it spans, where engines of several sizes take turns; 0 = by engine_args
    parallel: int = 0


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load the version in `file`, which is verified, and drop the prefix cache. `base`: the base
    model of adapters; verified, too, and loaded unless it is there already.

    The sender holds the file's lock until the answer has come.
    """

    file: VersionFile
    canary: Canary | None = None
    base: VersionFile | None = None


@dataclass(frozen=True, slots=True)
class ReceiveWeights:
    """As LoadWeights, from training rank 0: of `file` only the manifest is on this machine.

    The engine joins the group first unless it is a member, and generates nothing until the answer,
    EngineLoaded or EngineFailed.
    """

    file: VersionFile
    # of the engine's first worker, the others follow it
    membership: Membership
    canary: Canary | None = None


@dataclass(frozen=True, slots=True)
class DropBroadcast:
    """Leave the broadcast group, and drop a version that is being received: that then fails."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the memory of weights and KV cache on the devices; answered by EngineSlept. Running
    responses end as aborted, after their last tokens are sent."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the devices again; answered by EngineWoken. A LoadWeights must follow: until then there
    are no weights, and nothing is generated. An engine that cannot wake ends its process."""


@dataclass(frozen=True, slots=True)
class ScoreText:
    """Compute the logprobs of a text by the served weights; answered by TextScored."""

    name: Name
    # int32
    token_ids: Tokens


@dataclass(frozen=True, slots=True)
class TextScored:
    """The `Scores` of a text. `error`: why there are none, in one line."""

    name: Name
    # float32, int32, float32
    logprobs: Tokens = b""
    best: Tokens = b""
    best_logprobs: Tokens = b""
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineSlept:
    """The engine sleeps; no token follows. `freed_bytes`: on the devices, by the engine's own
    count."""

    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineWoken:
    """The engine is awake: there is room for weights."""

    seconds: float


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The engine is built. `num_workers`: processes that can be members of a broadcast group; 0 =
    it has no weights."""

    device: str
    start_s: float
    notes: tuple[str, ...] = ()
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The version is served. `load_s`: how long nothing was generated."""

    policy_version: int
    digest: str
    load_s: float
    # largest difference of a logprob to the trainer's; None = not compared
    canary_diff: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """A command failed, with the reason in one line; the engine continues unless its process ends.

    `policy_version` is that of a failed LoadWeights or ReceiveWeights, else None. `is_unusable`: no
    engine of this kind can be built here, whatever is asked of it. `is_dropped`: the broadcast has
    failed, not the version; responses continue when another one has been loaded.
    """

    reason: str
    policy_version: int | None = None
    is_unusable: bool = False
    is_dropped: bool = False


EngineCommand: TypeAlias = (
    EngineSpec
    | Generate
    | Abort
    | LoadWeights
    | ReceiveWeights
    | DropBroadcast
    | Sleep
    | Wake
    | ScoreText
)
EngineEvent: TypeAlias = (
    EngineStarted
    | TokenChunk
    | EngineLoaded
    | EngineFailed
    | Load
    | EngineSlept
    | EngineWoken
    | TextScored
)


@dataclass(slots=True)
class Delta:
    """Tokens that one engine step added to one response; logprobs as `sampling.sample` returns
    them: of the whole softmax at the temperature, whatever top_k and top_p leave out."""

    response: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    # in any of the deltas, tokens whose KV was there when the response started; None: not known
    num_cached: int | None = None


@dataclass(slots=True)
class Scores:
    """Of every token of a text but the first, given those before it: its logprob at temperature 1,
    and the likeliest token with its logprob."""

    logprobs: list[float]
    best: list[int]
    best_logprobs: list[float]


class Engine(Protocol):
    """One process, one model, many concurrent responses.

    Coupled sampling: the token at absolute position p of a response is a pure function of the
    weights, the tokens before p, and `sampling.keys(seed, p)`; so a response is the same whatever
    ran beside it and wherever it was interrupted.
    """

    device: str
    # in which it computes: "float32", "bfloat16"; another word for what rounds more than these
    dtype: str
    # what it cannot do of what was asked, one line each
    notes: tuple[str, ...]
    # processes that can be members of a broadcast group
    num_workers: int

    def remember(self, histories: tuple[PromptHistory, ...]) -> None:
        """Store texts to speculate with, if this engine does, before requests of these groups are
        added."""
        ...

    def add(self, request: ResponseRequest, sampling: Sampling) -> None:
        """Accept a response, which continues after its prefix; tokens of the prefix may be inserted
        ones. Raises EngineError if it cannot be run."""
        ...

    def abort(self, response: str) -> None:
        """Forget a response; unknown ones are ignored. No delta follows."""
        ...

    def step(self) -> list[Delta]:
        """Advance running responses by one step. A stop token is part of the response (finish
        "stop")."""
        ...

    def num_unfinished(self) -> int: ...

    def load_weights(self, file: VersionFile, base: VersionFile | None = None) -> None:
        """Replace all weights in place; running responses continue under the new ones with their KV
        recomputed. Loads adapters alone if their `base` is there already.

        The file's bytes are verified, its manifest is verified here. Raises WeightsError if names
        or shapes do not match; the engine then keeps or loses its old weights but must not be
        served from until a load succeeds.
        """
        ...

    def leave_group(self, why: str) -> None:
        """All workers leave their broadcast group, if they have one."""
        ...

    def receive_weights(self, command: ReceiveWeights, is_unwanted: IsUnwanted) -> None:
        """As `load_weights`, by a broadcast, in which all workers are members. Raises WeightsError
        also when the group fails, and where it can, as soon as `is_unwanted`."""
        ...

    def sleep(self) -> int:
        """Free the memory of weights and KV cache, while nothing runs, and return the bytes freed.
        Only of an engine that was built to (`EngineSpec.can_sleep`)."""
        ...

    def wake(self) -> None:
        """Allocate the weights again, with arbitrary values: `load_weights` must follow, and the KV
        cache has room after that. Raises RuntimeError if the devices have too little."""
        ...

    def logprobs_of(self, token_ids: list[int]) -> list[float]:
        """Return logprobs at temperature 1 of every token but the first, given those before it, by
        the served weights. Running responses get the same tokens as without. Raises EngineError for
        a text that is too long or not of this vocabulary."""
        ...

    def scores_of(self, token_ids: list[int]) -> Scores:
        """As `logprobs_of`, with the likeliest tokens."""
        ...

    def load(self) -> Load: ...

    def close(self) -> None: ...
