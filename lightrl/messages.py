"""Every message that crosses the wire between daemons, and nothing that stays inside one process.

Frozen dataclasses of plain types, so that they can be compared, printed and validated. Must import
nothing of LightRL but the bounds of their fields, and those of broadcasts, of several trainer
nodes, of shared devices and of engines' load, which have files of their own. Arrays travel as raw
little-endian bytes: token ids as int32, logprobs as float32 (`wire.pack_i32`, `wire.pack_f32`).

The types say how long a field may be, and numbers within which range: wire.py looks at the length
that a frame announces before it makes anything of what follows, so a frame costs a bounded multiple
of its size, whoever sent it. What types cannot say is in transport/validate.py and
daemon/admission.py.

Who says what to whom (node = any daemon, head = the coordinator's daemon):

    node -> head   Hello Heartbeat TokenChunk WeightsEndpoint PublishWeights WeightsReady
                   WeightsFailed BadSource ShardsTaken StepDone Checkpointed Drain Bye
                   BroadcastOpened BroadcastJoined BroadcastSums BroadcastFailed
                   TrainerRelay Released Parked
    head -> node   Welcome Heartbeat Generate Abort TrainShard PublishWeights VersionTaken Drain
                   OpenBroadcast JoinBroadcast SendBroadcast BroadcastSums
                   TrainerSet TrainerRelay Release Wake Give Park
    tool -> head   Watch Drain              (lightrl status, top, drain, down)
    head -> tool   Snapshot
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from lightrl.broadcast_messages import (
    BroadcastFailed,
    BroadcastJoined,
    BroadcastOpened,
    BroadcastSums,
    JoinBroadcast,
    OpenBroadcast,
    SendBroadcast,
    VersionTaken,
)
from lightrl.cost_messages import CostRow
from lightrl.load_messages import Load
from lightrl.message_fields import (
    MAX_ADDRESSES,
    MAX_CONFIG,
    MAX_DELTAS,
    MAX_GROUPS,
    MAX_METRICS,
    MAX_SOURCES,
    MAX_STOPS,
    MAX_WATCH_S,
    RESPONSES,
    ROWS,
    Attempt,
    Bits,
    Count,
    Int32,
    Int64,
    LongText,
    Metrics,
    ModelFiles,
    Name,
    Reason,
    Slots,
    Text,
    Tokens,
    Version,
    Word,
)
from lightrl.sharing_messages import Give, Park, Parked, Release, Released, Wake
from lightrl.trainer_messages import TrainerRelay, TrainerSet

PROTOCOL = 13
# why a node is refused that was given up while it was silent: it may say hello again
REJOIN = "rejoin"
ENDING = "the run is ending"  # and one that comes too late
# it may say hello again: that one may be gone soon
TAKEN = "another process with this name takes part"

Role: TypeAlias = Literal["coordinator", "trainer", "rollout"]
FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Hello:
    """A daemon introduces itself; again, with what it still runs, when messages may have been lost.

    The coordinator takes back what it still wants of `running` and aborts the rest.
    Example: Hello("rollout-0", 17, ("rollout",), 3, pid=4242, host="a", slots=128)
    """

    node: Name
    # of what runs there; another one replaces what was known under this name
    incarnation: Int64
    roles: Annotated[tuple[Role, ...], Meta(max_length=3)]
    protocol: Int64
    pid: Int64
    host: Word
    # responses that may run at once; 0 = as the run's config says
    slots: Slots = 0
    # policy version and digest that its engine has loaded
    serves: tuple[Version, Word] | None = None
    # (response, attempt) that it generates
    running: Annotated[tuple[Attempt, ...], RESPONSES] = ()
    # has what it `serves` as a file, from which others can pull; not after a broadcast
    has_file: bool = True
    # may be taken away at any moment
    is_preemptible: bool = False
    # of several trainer nodes the one that decides what their ranks do
    leads: bool = False
    # the trainer node whose devices this rollout node uses; "" = its own
    shares: Word = ""
    # which part of those, where parts change sides by themselves, from 0 on
    part: Count = 0
    # of devices that are used in turn: others have them now; its engine sleeps, or its ranks are
    # parked
    is_released: bool = False
    # devices of its engine, if engines of other sizes use them in turn. 0: no; all daemons say so
    parallel: Count = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator accepts a node, or says in one line why not.

    Carries all a node needs to take part, so that it needs no shared file system: the resolved
    config as JSON and the small files of the model directory (config.json and the like, no
    weights). Example: Welcome("quickstart", config_json="{...}", model_files={"config.json":
    b"{...}"})
    """

    run: Word
    config_json: Annotated[str, Meta(max_length=MAX_CONFIG)] = ""
    model_files: ModelFiles = field(default_factory=dict[str, bytes])
    # empty = accepted; or one line, of which REJOIN, ENDING and TAKEN are known
    refused: Reason = ""


@dataclass(frozen=True, slots=True)
class WeightsProgress:
    """How far a node is with a version that it pulls. Example: WeightsProgress(4, 7, 15, 3)."""

    policy_version: Version
    # proved
    num_bytes: Count
    total_bytes: Count
    # that it pulls from
    num_sources: Count = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive; the head sends its own. Example: Heartbeat(Load(running=3), 0.4, "cpu")."""

    load: Load = field(default_factory=Load)
    # how late the sender's event loop is
    loop_lag_ms: float = 0.0
    # of its engine or ranks, once they have started
    device: Word = ""
    # of the version that it pulls
    weights: WeightsProgress | None = None
    # of its engine, once it has started, each with a device of its own; 0: none that can receive
    # weights by broadcast
    num_workers: Count = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 = greedy; top_k 0 = off. Example: Sampling(1.0)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOPS)] = ()


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One response to generate or to resume.

    `seed` and the absolute position (index into prompt + response) determine the noise of every
    sampled token. `prefix` holds tokens sampled earlier, by this or another node. Example:
    ResponseRequest("p7@0#3", 1, seed=9, prompt=<2 tokens>, prefix=<0 tokens>, max_new_tokens=5)
    """

    response: Name
    attempt: Int32
    # 0 <= seed < 2**63
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    # int32
    prompt: Tokens
    # int32, tokens of the response already held
    prefix: Tokens
    # counted after the prefix
    max_new_tokens: Int64


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """How a prompt was answered before, oldest first: drafts for those who answer it now.

    Example: PromptHistory("p7@1", responses=(<12 int32>, <9 int32>), rewards=(1.0, None))
    """

    # of the responses that it helps
    group: Name
    # int32
    responses: Annotated[tuple[Tokens, ...], RESPONSES]
    # one for each; None = no score
    rewards: Annotated[tuple[float | None, ...], RESPONSES]


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate these responses with this version of the policy.

    `histories` are of the groups of the requests, each sent to a node with the first of them.
    Example: Generate(policy_version=4, sampling=Sampling(1.0), requests=(ResponseRequest(...),))
    """

    policy_version: Version
    sampling: Sampling
    requests: Annotated[tuple[ResponseRequest, ...], RESPONSES]
    histories: Annotated[tuple[PromptHistory, ...], RESPONSES] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop generating these attempts; tokens already sent are kept. Example: Abort((("p7@0#3",
    1),))."""

    attempts: Annotated[tuple[Attempt, ...], RESPONSES]


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """New tokens of one response. `offset` counts response tokens, prefix included.

    Example: ResponseTokens("p7@0#3", 1, offset=16, token_ids=<16 int32>, logprobs=<16 float32>)
    """

    response: Name
    attempt: Int32
    offset: Int32
    # int32
    token_ids: Tokens
    # float32, of the distribution that was sampled from
    logprobs: Tokens
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """All new tokens of one node, of one policy version whose digest that node has confirmed.

    Example: TokenChunk(4, "9f3a...", (ResponseTokens(...), ResponseTokens(...)))
    """

    policy_version: Version
    digest: Word
    responses: Annotated[tuple[ResponseTokens, ...], RESPONSES]


@dataclass(frozen=True, slots=True)
class TrainResponse:
    """One scored response to train on. Example: TrainResponse("p7@0#3", ids, logprobs, 1.0,
    "stop")."""

    response: Name
    # int32
    token_ids: Tokens
    # float32
    rollout_logprobs: Tokens
    reward: float
    finish_reason: FinishReason
    # a bit for each token, 1 = it is trained, see `loss_mask`; "" = all are
    loss_mask: Bits = b""
    # tokens at its beginning that were sampled by versions before the shard's
    num_stale: Int32 = 0


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A whole group: what one prompt's advantage needs. Example: TrainGroup("p7@0", ids, (r0,
    r1))."""

    group: Name
    # int32
    prompt: Tokens
    responses: Annotated[tuple[TrainResponse, ...], RESPONSES]


@dataclass(frozen=True, slots=True)
class TrainShard:
    """Groups of one step, streamed while others still generate; identified by (step, index).

    `policy_version` is the version that sampled them and that the trainer must hold. The shard with
    `last` set closes the step, `num_groups` then counts the groups of all its shards.
    Example: TrainShard(step=4, index=2, policy_version=4, groups=(g,), last=False)
    """

    step: Version
    index: Int32
    policy_version: Version
    groups: Annotated[tuple[TrainGroup, ...], Meta(max_length=MAX_GROUPS)]
    last: bool = False
    num_groups: Int32 = 0
    # accumulate just these groups at once, by this replica: to give the same bits again
    alone: bool = False
    replica: Int32 = 0


@dataclass(frozen=True, slots=True)
class ShardsTaken:
    """The trainer has taken shard `index` of a step, and those before it, out of its queue: more
    may come. Example: ShardsTaken(4, 2).
    """

    step: Version
    index: Int32


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint of `step` steps is durable; no step before `oldest` will be trained again.

    Should it turn out to be damaged, the trainer goes back to an older one. Example:
    Checkpointed(20, 10).
    """

    step: Version
    # steps done in the oldest checkpoint that is kept; 0 = in the model itself
    oldest: Version = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """The optimizer step is done and its version published. Example: StepDone(4, 5, {"loss/policy":
    0.1})."""

    step: Version
    policy_version: Version
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class WeightsEndpoint:
    """Where this node serves what it holds of the weights, and the secret from which the tickets of
    those who may ask are made. Said after each welcome.

    Host 0.0.0.0 stands for the one by which the receiver reaches the coordinator. Example:
    WeightsEndpoint(("10.0.0.1:41873",), "c0ffee...")
    """

    # "host:port", any of them
    addresses: Annotated[tuple[Word, ...], Meta(max_length=MAX_ADDRESSES)]
    secret: Word


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A node from which a version can be pulled, as much of it as it has.

    `ticket` is for the receiver alone (tickets.pull_ticket). Example: WeightsSource("rollout-0",
    ("10.0.0.2:40119",), "77e0...")
    """

    node: Name
    addresses: Annotated[tuple[Word, ...], Meta(max_length=MAX_ADDRESSES)]
    ticket: Word


@dataclass(frozen=True, slots=True)
class DeltaOffer:
    """The difference between two versions, to be had from the sources of the second. Digests of the
    versions, and of the difference's own manifest.

    Example: DeltaOffer("9f3a...", "a01c...", "77aa...", manifest_bytes=4210, num_bytes=91022)
    """

    base: Word
    target: Word
    digest: Word
    manifest_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class WeightsBase:
    """What adapters are beside: pulled once, as a version is. Sources as in PublishWeights, with
    tickets for version 0, so that they hold whichever version comes next.

    Example: WeightsBase("4b7e...", 2112512, 8190, sources=(WeightsSource(...),))
    """

    digest: Word
    num_bytes: Count
    manifest_bytes: Count
    sources: Annotated[tuple[WeightsSource, ...], Meta(max_length=MAX_SOURCES)] = ()


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed text and the logprobs that the trainer gives its tokens. Example: Canary(<32 int32>,
    <31 float32>)."""

    # int32
    token_ids: Tokens
    # float32, of each token but the first, given those before
    logprobs: Tokens
    # in which they were computed
    dtype: Word = "float32"


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """A complete version can be pulled from `sources`, its manifest included.

    The trainer names no sources; the coordinator does so for each node. The first one of a trainer
    that has said hello tells where it stands: it trains that step next.

    Example: PublishWeights(4, "9f3a...", 2112512, 8190, sources=(WeightsSource(...),),
    portions=(3, 29))
    """

    policy_version: Version
    # of the manifest's bytes, hex
    digest: Word
    # of the version's file
    num_bytes: Count
    manifest_bytes: Count
    # in the order in which they should be asked
    sources: Annotated[tuple[WeightsSource, ...], Meta(max_length=MAX_SOURCES)] = ()
    # from the trainer: the difference to the version before; to a node: a chain that ends here
    deltas: Annotated[tuple[DeltaOffer, ...], Meta(max_length=MAX_DELTAS)] = ()
    canary: Canary | None = None
    # groups accumulated at a time for it, in order; () = loaded, not trained. By which replica of
    # the model each; () = there is one
    portions: Annotated[tuple[Int32, ...], RESPONSES] = ()
    replicas: Annotated[tuple[Int32, ...], RESPONSES] = ()
    # the broadcast group by which the node gets it; "" = it pulls. Sources have the manifest
    group: Word = ""
    # the version is adapters: only together with this it is weights
    base: WeightsBase | None = None


@dataclass(frozen=True, slots=True)
class BadSource:
    """This source of a version sent bytes that are not those of the version. Example: BadSource(4,
    "rollout-3", "bucket 7: digest differs")."""

    policy_version: Version
    node: Name
    reason: Text


@dataclass(frozen=True, slots=True)
class WeightsReady:
    """The engine serves this version; its bytes were proved to have `digest`.

    Example: WeightsReady(4, "9f3a...", num_bytes=2112512, pull_s=0.01, load_s=0.03)
    """

    policy_version: Version
    digest: Word
    # that were transferred
    num_bytes: Count = 0
    pull_s: float = 0.0
    # that the engine stood still
    load_s: float = 0.0
    # of num_bytes: from other rollout nodes; as differences
    peer_bytes: Count = 0
    delta_bytes: Count = 0
    # largest difference of a logprob to the trainer's; None = not compared
    canary_diff: float | None = None
    # until it had been received and proved, if it came by broadcast: then there is no file of it
    broadcast_s: float | None = None


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    """A version cannot be served, or not any more. Example: WeightsFailed(4, "bucket 3: digest
    differs")."""

    policy_version: Version
    reason: Text


@dataclass(frozen=True, slots=True)
class Drain:
    """From a tool: let `node` go ("*" = stop the run). To a node: leave. From a node: no more work,
    I leave. Example: Drain("rollout-0", "SIGTERM").
    """

    node: Word
    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class Bye:
    """A node leaves for good; nothing more will come from it. Example: Bye("drained").

    `ok` False means that it failed, with the reason in one line.
    """

    reason: Text
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Watch:
    """Send me snapshots, now and every `every_s` seconds (0 = just one). Example: Watch(0.5)."""

    every_s: Annotated[float, Meta(ge=0, le=MAX_WATCH_S)] = 0.0


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as an operator sees it."""

    name: Word
    roles: Annotated[tuple[Role, ...], Meta(max_length=3)]
    # joining loading ready updating releasing released draining gone
    state: Word
    host: Word
    pid: int
    device: Word
    policy_version: int | None
    running: int
    slots: int
    tokens_per_s: float
    kv_usage: float
    heard_s_ago: float
    loop_lag_ms: float = 0.0
    # of the version that it pulls
    weights: WeightsProgress | None = None
    broadcast: Word = ""  # by which its next version comes: forming sending proving
    # None: it shares no devices; else for how long it is in its state, and so on its side
    state_s: float | None = None
    # whose devices those are; which part of them, None: they change sides as a whole
    shares: Word = ""
    part: int | None = None


@dataclass(frozen=True, slots=True)
class SampleText:
    """One finished response as text, for the sample browser."""

    response: Name
    prompt: LongText
    text: LongText
    reward: float | None
    num_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class TailRow:
    """Tail batching as an operator sees it; the figures are of the whole run so far."""

    # "prompts", "both"
    mode: str
    # prompts put off that wait for a long round
    queue: int
    # rounds
    num_short: int
    # rounds, those that flush an epoch's rest included
    num_long: int
    # mean tokens of what is trained
    kept_length: float
    # and of all that was launched, as estimated
    launched_length: float
    kept_reward: float
    # of all that has a score
    scored_reward: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment; all that the terminal UI and `lightrl status` may know.

    Histories hold one value per finished step, oldest first, at most the last 500.
    """

    run: str
    run_dir: str
    # starting running evaluating finishing finished stopped failed
    state: str
    # optimizer steps done
    step: int
    num_steps: int
    policy_version: int | None
    elapsed_s: float
    nodes: Annotated[tuple[NodeRow, ...], ROWS] = ()
    # "" between rounds, "plain", "short", "long", "flush", "eval"
    round_kind: str = ""
    # groups that have all the scores they need
    round_accepted: int = 0
    round_needed: int = 0
    responses_running: int = 0
    responses_queued: int = 0
    # of the rounds that are open
    responses_done: int = 0
    tail: TailRow | None = None  # None: no tail batching
    max_staleness: int = 0  # 0 = synchronous
    cost: CostRow | None = None
    # of the whole run
    rollout_tokens: int = 0
    tokens_per_s: float = 0.0
    rewards: Annotated[tuple[float, ...], ROWS] = ()
    # mean response length per step
    lengths: Annotated[tuple[float, ...], ROWS] = ()
    step_seconds: Annotated[tuple[float, ...], ROWS] = ()
    # (step, score)
    evals: Annotated[tuple[tuple[int, float], ...], ROWS] = ()
    # (upper bound in tokens, responses), last step
    length_histogram: Annotated[tuple[tuple[int, int], ...], ROWS] = ()
    # of the last step
    metrics: Metrics = field(default_factory=dict[str, float])
    # reward failures, lost nodes, bad frames, ...
    counters: Annotated[dict[Word, int], Meta(max_length=MAX_METRICS)] = field(
        default_factory=dict[str, int]
    )
    # (seconds since the start, one line), oldest first
    events: Annotated[tuple[tuple[float, LongText], ...], ROWS] = ()
    # latest first
    samples: Annotated[tuple[SampleText, ...], ROWS] = ()


Message: TypeAlias = (
    Hello
    | Welcome
    | Heartbeat
    | Generate
    | Abort
    | TokenChunk
    | TrainShard
    | ShardsTaken
    | StepDone
    | Checkpointed
    | WeightsEndpoint
    | PublishWeights
    | WeightsReady
    | BadSource
    | WeightsFailed
    | VersionTaken
    | OpenBroadcast
    | BroadcastOpened
    | JoinBroadcast
    | BroadcastJoined
    | SendBroadcast
    | BroadcastSums
    | BroadcastFailed
    | TrainerSet
    | TrainerRelay
    | Release
    | Released
    | Wake
    | Give
    | Park
    | Parked
    | Drain
    | Bye
    | Watch
    | Snapshot
)
