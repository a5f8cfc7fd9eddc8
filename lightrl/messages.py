"""Every message that crosses the wire between daemons, and nothing that stays inside one process.

Frozen dataclasses of plain types, so that they can be compared, printed and validated. Must not
import anything of LightRL. Arrays travel as raw little-endian bytes: token ids as int32, logprobs
as float32 (see `wire.pack_i32`, `wire.pack_f32`).

Who says what to whom (node = any daemon, head = the coordinator's daemon):

    node -> head   Hello Heartbeat TokenChunk PublishWeights WeightsReady WeightsFailed StepDone Checkpointed
                   Drain Bye
    head -> node   Welcome Heartbeat Generate Abort TrainShard PublishWeights Drain
    tool -> head   Watch Drain              (lightrl status, top, drain, down)
    head -> tool   Snapshot
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

PROTOCOL = 4
REJOIN = "rejoin"  # why a node is refused that was given up while it was silent: it may say hello again
ENDING = "the run is ending"  # and one that comes too late

Role: TypeAlias = Literal["coordinator", "trainer", "rollout"]
FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Drafting:
    """What speculation did since the engine started. Example: Drafting(90, 80, 12, 92, 0.001, 0.2)."""

    drafted: int = 0  # tokens
    accepted: int = 0  # of them
    forwards: int = 0  # response-steps, with a draft or without
    emitted: int = 0  # tokens that came of them
    draft_s: float = 0.0  # spent on drafting alone
    engine_s: float = 0.0  # of all steps


@dataclass(frozen=True, slots=True)
class Load:
    """What a rollout node's engine is doing. Example: Load(running=12, waiting=0, kv_usage=0.3)."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the KV cache in use, 0..1
    num_preemptions: int = 0  # KV preemptions since the engine started
    drafting: Drafting | None = None  # None: this engine does not speculate


@dataclass(frozen=True, slots=True)
class Hello:
    """A daemon introduces itself; again, with what it still runs, when messages may have been lost.

    The coordinator takes back what it still wants of `running` and aborts the rest.
    Example: Hello("rollout-0", 17, ("rollout",), 3, pid=4242, host="a", slots=128)
    """

    node: str
    incarnation: int  # of what runs there; another one replaces what was known under this name
    roles: tuple[Role, ...]
    protocol: int
    pid: int
    host: str
    slots: int = 0  # responses that may run at once; 0 = as the run's config says
    serves: tuple[int, str] | None = None  # policy version and digest that its engine has loaded
    running: tuple[tuple[str, int], ...] = ()  # (response, attempt) that it generates


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator accepts a node, or says in one line why not.

    Carries all a node needs to take part, so that it needs no shared file system: the resolved
    config as JSON and the small files of the model directory (config.json and the like, no weights).
    Example: Welcome("quickstart", config_json="{...}", model_files={"config.json": b"{...}"})
    """

    run: str
    config_json: str = ""
    model_files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    refused: str = ""  # empty = accepted; or why not in one line, of which REJOIN and ENDING are known


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive; the head sends its own. Example: Heartbeat(Load(running=3), 0.4, "cpu")."""

    load: Load = field(default_factory=Load)
    loop_lag_ms: float = 0.0  # how late the sender's event loop is
    device: str = ""  # of its engine or ranks, once they have started


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 = greedy; top_k 0 = off. Example: Sampling(1.0)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One response to generate or to resume.

    `seed` and the absolute position (index into prompt + response) determine the noise of every
    sampled token. `prefix` holds tokens sampled earlier, by this or another node.
    Example: ResponseRequest("p7@0#3", 1, seed=9, prompt=<2 tokens>, prefix=<0 tokens>, max_new_tokens=5)
    """

    response: str
    attempt: int
    seed: int  # 0 <= seed < 2**63
    prompt: bytes  # int32
    prefix: bytes  # int32, tokens of the response already held
    max_new_tokens: int  # counted after the prefix


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """How a prompt was answered before, oldest first: drafts for those who answer it now.

    Example: PromptHistory("p7@1", responses=(<12 int32>, <9 int32>), rewards=(1.0, None))
    """

    group: str  # of the responses that it helps
    responses: tuple[bytes, ...]  # int32
    rewards: tuple[float | None, ...]  # one for each; None = no score


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate these responses with this version of the policy.

    `histories` are of the groups of the requests, each sent to a node with the first of them.
    Example: Generate(policy_version=4, sampling=Sampling(1.0), requests=(ResponseRequest(...),))
    """

    policy_version: int
    sampling: Sampling
    requests: tuple[ResponseRequest, ...]
    histories: tuple[PromptHistory, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop generating these attempts; tokens already sent are kept. Example: Abort((("p7@0#3", 1),))."""

    attempts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """New tokens of one response. `offset` counts response tokens, prefix included.

    Example: ResponseTokens("p7@0#3", 1, offset=16, token_ids=<16 int32>, logprobs=<16 float32>)
    """

    response: str
    attempt: int
    offset: int
    token_ids: bytes  # int32
    logprobs: bytes  # float32, of the distribution that was sampled from
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """All new tokens of one node, of one policy version whose digest that node has confirmed.

    Example: TokenChunk(4, "9f3a...", (ResponseTokens(...), ResponseTokens(...)))
    """

    policy_version: int
    digest: str
    responses: tuple[ResponseTokens, ...]


@dataclass(frozen=True, slots=True)
class TrainResponse:
    """One scored response to train on. Example: TrainResponse("p7@0#3", ids, logprobs, 1.0, "stop")."""

    response: str
    token_ids: bytes  # int32
    rollout_logprobs: bytes  # float32
    reward: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A whole group: what one prompt's advantage needs. Example: TrainGroup("p7@0", ids, (r0, r1))."""

    group: str
    prompt: bytes  # int32
    responses: tuple[TrainResponse, ...]


@dataclass(frozen=True, slots=True)
class TrainShard:
    """Groups of one step, streamed while others still generate; identified by (step, index).

    `policy_version` is the version that sampled them and that the trainer must hold. The shard with
    `last` set closes the step, `num_groups` then counts the groups of all its shards.
    Example: TrainShard(step=4, index=2, policy_version=4, groups=(g,), last=False)
    """

    step: int
    index: int
    policy_version: int
    groups: tuple[TrainGroup, ...]
    last: bool = False
    num_groups: int = 0
    alone: bool = False  # accumulate just these groups at once: a step trained again must give the same bits


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint of `step` steps is durable; no earlier one is needed. Example: Checkpointed(20)."""

    step: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """The optimizer step is done and its version published. Example: StepDone(4, 5, {"loss/policy": 0.1})."""

    step: int
    policy_version: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies: `offset` bytes into bucket number `bucket`.

    Example: TensorSpec("model.norm.weight", "float32", (128,), bucket=0, offset=512)
    """

    name: str  # HF parameter name
    dtype: str  # torch name without prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    bucket: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous run of weight bytes, the unit of transfer and of verification."""

    size: int  # bytes
    digest: str  # hex


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version consists of. `digest` covers names, dtypes, shapes and all bucket digests.

    Example: Manifest(4, "9f3a...", tensors=(TensorSpec(...),), buckets=(Bucket(1 << 20, "77.."),))
    """

    policy_version: int
    digest: str
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """A complete version can be pulled from `holders` ("host:port", any of them) with `ticket`.

    From the trainer `ticket` is the version's secret; what a node gets is derived from it for that node
    (keys.pull_ticket). Host 0.0.0.0 stands for the one by which the receiver reaches the coordinator.
    The first one of a trainer that has said hello tells where it stands: it trains that step next.

    Example: PublishWeights(manifest, ("10.0.0.1:41873",), ticket="c0ffee...", portions=(3, 29))
    """

    manifest: Manifest
    holders: tuple[str, ...]
    ticket: str
    portions: tuple[int, ...] = ()  # groups accumulated at a time for it, in order; () = loaded, not trained


@dataclass(frozen=True, slots=True)
class WeightsReady:
    """The engine serves this version; `digest` was computed from the bytes it loaded.

    Example: WeightsReady(4, "9f3a...", num_bytes=2112512, pull_s=0.01, load_s=0.03)
    """

    policy_version: int
    digest: str
    num_bytes: int = 0
    pull_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    """A version cannot be served, or not any more. Example: WeightsFailed(4, "bucket 3: digest differs")."""

    policy_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """From a tool: let `node` go ("*" = stop the run). To a node: leave. From a node: no more work, I leave.

    Example: Drain("rollout-0", "SIGTERM")
    """

    node: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bye:
    """A node leaves for good; nothing more will come from it. Example: Bye("drained").

    `ok` False means that it failed, with the reason in one line.
    """

    reason: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Watch:
    """Send me snapshots, now and every `every_s` seconds (0 = just one). Example: Watch(0.5)."""

    every_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as an operator sees it."""

    name: str
    roles: tuple[Role, ...]
    state: str  # joining loading ready updating draining gone
    host: str
    pid: int
    device: str
    policy_version: int | None
    running: int
    slots: int
    tokens_per_s: float
    kv_usage: float
    heard_s_ago: float
    loop_lag_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished response as text, for the sample browser."""

    response: str
    prompt: str
    text: str
    reward: float | None
    num_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class TailRow:
    """Tail batching as an operator sees it; the figures are of the whole run so far."""

    mode: str  # "prompts", "both"
    queue: int  # prompts put off that wait for a long round
    num_short: int  # rounds
    num_long: int  # rounds, those that flush an epoch's rest included
    kept_length: float  # mean tokens of what is trained
    launched_length: float  # and of all that was launched, as estimated
    kept_reward: float
    scored_reward: float  # of all that has a score


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment; all that the terminal UI and `lightrl status` may know.

    Histories hold one value per finished step, oldest first, at most the last 500.
    """

    run: str
    run_dir: str
    state: str  # starting running evaluating finishing finished stopped failed
    step: int  # optimizer steps done
    num_steps: int
    policy_version: int | None
    elapsed_s: float
    nodes: tuple[NodeRow, ...] = ()
    round_kind: str = ""  # "" between rounds, "plain", "short", "long", "flush", "eval"
    round_accepted: int = 0  # groups that have all the scores they need
    round_needed: int = 0
    responses_running: int = 0
    responses_queued: int = 0
    responses_done: int = 0  # of the rounds that are open
    tail: TailRow | None = None  # None: no tail batching
    max_staleness: int = 0  # 0 = synchronous
    rollout_tokens: int = 0  # of the whole run
    tokens_per_s: float = 0.0
    rewards: tuple[float, ...] = ()
    lengths: tuple[float, ...] = ()  # mean response length per step
    step_seconds: tuple[float, ...] = ()
    evals: tuple[tuple[int, float], ...] = ()  # (step, score)
    length_histogram: tuple[tuple[int, int], ...] = ()  # (upper bound in tokens, responses), last step
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # of the last step
    counters: dict[str, int] = field(
        default_factory=dict[str, int]
    )  # reward failures, lost nodes, bad frames, ...
    events: tuple[tuple[float, str], ...] = ()  # (seconds since the start, one line), oldest first
    samples: tuple[Sample, ...] = ()  # latest first


Message: TypeAlias = (
    Hello
    | Welcome
    | Heartbeat
    | Generate
    | Abort
    | TokenChunk
    | TrainShard
    | StepDone
    | Checkpointed
    | PublishWeights
    | WeightsReady
    | WeightsFailed
    | Drain
    | Bye
    | Watch
    | Snapshot
)
