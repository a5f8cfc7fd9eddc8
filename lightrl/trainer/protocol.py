"""Messages between the trainer's daemon and one rank process, over `child.Pipe`.

    daemon -> rank   StartRank Accumulate Update ResetStep Suspend EncodeDelta Save
                     OpenGroup SendWeights LeaveBroadcast
    rank -> daemon   RankStarted Done StillAlive StepFinished Saved RankFailed

All ranks get the same commands in the same order, so that their collectives match, except that
Accumulate goes to the ranks of one replica, and the commands of broadcasts, which are no
collectives, to rank 0. A rank answers in the order of its commands; StillAlive and Saved come at
any time. Must not import torch: the daemon imports this file.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from lightrl.messages.responses import FinishReason
from lightrl.messages.weights import Canary
from lightrl.weights.broadcast.membership import Membership
from lightrl.weights.version.manifest import VersionFile
from lightrl.wire import Codec

RANK_TARGET = "lightrl.trainer.rank.rank:main"
EMULATED_TARGET = "lightrl.trainer.rank.emulated:main"
EVALUATED_TARGET = "lightrl.trainer.rank.evaluated:main"

MAX_BATCHES = 8  # micro-batches of one command: a rank without an answer for long counts as hung


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One response with its advantage. Example: TrainSample("p7@0#3", ids, ids, logprobs, 0.5,
    "stop")."""

    response: str
    # int32; empty for an episode, whose response begins with tokens that are not trained
    prompt: bytes
    token_ids: bytes  # int32
    # float32, as many as token_ids
    rollout_logprobs: bytes
    advantage: float
    finish_reason: FinishReason = "stop"
    # see `loss_mask`: which of the tokens are trained
    loss_mask: bytes = b""
    # tokens at its beginning that were sampled by versions before the one that is updated
    num_stale: int = 0


MicroBatch: TypeAlias = tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class StartRank:
    """Load the model and become rank `rank` of `world`; answered by RankStarted.

    With start_step > 0, or in a run that begins from another one's checkpoint, the rank restores
    `run_dir`/checkpoints/step_N. Rank 0 publishes version `start_step`. The first node has the
    first ranks. Example: StartRank("{...}", "models/tiny", 0, 2, "weights/.ranks-5f0c", "weights",
    "runs/a")
    """

    # a resolved Config
    config_json: str
    # a local directory or a hub id
    model_dir: str
    rank: int
    world: int
    # a file that the ranks create, where they find each other; unused when world is 1
    rendezvous: str
    publish_dir: str
    run_dir: str
    start_step: int = 0
    # address of this machine for engines on other machines; "" = no broadcasts
    nccl_host: str = ""
    # address of this machine for ranks of other nodes; "" = one node
    host: str = ""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the gradients of this rank's micro-batches; answered by Done.

    Every rank of a replica gets the same number of them, some of which may be empty. Example:
    Accumulate(4, batches=((s0, s1), (s2,), ()))
    """

    step: int
    batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """All samples of a mini-batch were sent: update the weights. Answered by Done; with
    `policy_version`, which ends the step and publishes the weights, by StepFinished.

    The totals count all trained responses of the mini-batch on all ranks, also those without signal
    that were not sent. `step` counts from 0. Example: Update(4, 256, 7912, policy_version=5)
    """

    step: int
    num_responses: int
    # response tokens that are trained
    num_tokens: int
    # of the weights after the last update of the step
    policy_version: int | None = None


@dataclass(frozen=True, slots=True)
class ResetStep:
    """Drop the gradients of the step and undo the updates of its mini-batches; answered by Done.
    Example: ResetStep(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class Suspend:
    """Free the device in the middle of a step; answered by Done with `suspended`. The next
    command for gradients takes it again. Example: Suspend(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class EncodeDelta:
    """Encode the difference between the last two versions; answered by Done with `delta`.
    Example: EncodeDelta(5)."""

    # of the newer version
    step: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of `step` updates to the directory `path`; answered by Done once the
    tensors are copied. Later rank 0 sends Saved.

    With `export` it also writes `path`/hf, a model directory as transformers and vLLM read it, and
    rank 0 sends another Saved. A save waits for the save before it, but not for its export.
    Example: Save(5, "runs/a/checkpoints/step_5", export=True)
    """

    step: int
    path: str
    export: bool = False


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """To rank 0: listen on `host` for the members of a broadcast group; answered by Done with
    `address`. Example: OpenGroup("10.0.0.1", Membership(...))."""

    host: str
    membership: Membership


@dataclass(frozen=True, slots=True)
class SendWeights:
    """To rank 0: send a published version to the group of this name, which forms first if it was
    just opened; answered by Done."""

    file: VersionFile
    group: str


@dataclass(frozen=True, slots=True)
class LeaveBroadcast:
    """To rank 0: stop listening, forming or sending, and leave the group. No answer but that of the
    command that it ends."""


RankCommand: TypeAlias = (
    StartRank
    | Accumulate
    | Update
    | ResetStep
    | Suspend
    | EncodeDelta
    | Save
    | OpenGroup
    | SendWeights
    | LeaveBroadcast
)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that all ranks have written; sent by rank 0 alone."""

    file: VersionFile
    canary: Canary | None = None
    # the model beside which adapters are served
    base: VersionFile | None = None


@dataclass(frozen=True, slots=True)
class Suspended:
    """Nothing of the rank is on its device. Example: Suspended(22_000_000_000, 1.1)."""

    # moved to the host
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankStarted:
    """The rank is ready for the first step."""

    # "cpu", "cuda:0"
    device: str
    start_s: float
    published: Published | None = None
    # a micro-batch is one row of sequences; else padded rows
    is_packed: bool = True
    # a line each on how this family is computed
    notes: tuple[str, ...] = ()
    # on shared devices
    suspended: Suspended | None = None


@dataclass(frozen=True, slots=True)
class VersionDelta:
    """The difference between two versions, small enough to serve; the daemon removes the file."""

    # digests of the older and of the newer version
    base: str
    target: str
    # has the digest of the difference itself
    file: VersionFile


@dataclass(frozen=True, slots=True)
class Done:
    """The command is carried out. `error`: why a broadcast group is over, in one line. Example:
    Done(4)."""

    step: int
    error: str | None = None
    # answers Suspend
    suspended: Suspended | None = None
    # answers EncodeDelta, from rank 0
    delta: VersionDelta | None = None
    # answers OpenGroup: the members of the group meet there
    address: str = ""


@dataclass(frozen=True, slots=True)
class StillAlive:
    """The rank is alive: it has computed MAX_BATCHES micro-batches more of a long command. No
    answer. Example: StillAlive(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The weights are updated and, on rank 0, published. `metrics` are equal on all ranks, except
    for times."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    published: Published | None = None
    # on shared devices
    suspended: Suspended | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """From rank 0: the checkpoint, or its export, is durable. `error`: why there is none, in one
    line; the ranks continue. Example: Saved("runs/a/checkpoints/step_5")."""

    path: str
    error: str | None = None
    is_export: bool = False


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank ends; `reason` is one line, its log has the traceback.

    `is_final`: a restart would fail in the same way, as for a model that cannot be loaded.
    """

    reason: str
    is_final: bool = False


RankEvent: TypeAlias = RankStarted | Done | StillAlive | StepFinished | Saved | RankFailed

# Commands with which a suspended rank takes its device again.
TAKES_DEVICE = (Accumulate, Update)

RANK_COMMANDS: Codec[RankCommand] = Codec(RankCommand)
RANK_EVENTS: Codec[RankEvent] = Codec(RankEvent)
