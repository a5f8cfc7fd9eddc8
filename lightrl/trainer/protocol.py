"""What the trainer's daemon and one rank process say to each other through `child.Pipe`.

Owns only the vocabulary. Must not import torch: the daemon imports this file.

    daemon -> rank   StartRank Accumulate UpdateWeights ClearStep FinishStep ParkRank EncodeDelta
                     Save OpenGroup SendWeights LeaveGroup
    rank -> daemon   RankStarted Accumulated Computing Updated Cleared RankParked Published
                     StepFinished DeltaMade Staged Saved SaveFailed Exported GroupOpened WeightsSent
                     RankFailed

All ranks get the same commands in the same order, so that their collectives line up; of Accumulate
the ranks of one replica do, and others get their own meanwhile. A rank answers in the
order it is told; only Computing, and what rank 0 says of a checkpoint that is being written, come
whenever it is so far.
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

AT_ONCE = 8  # micro-batches for one sign of life: a rank that says nothing for long hangs


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One response with its advantage. Example: TrainSample("p7@0#3", ids, ids, logprobs, 0.5,
    "stop")."""

    response: str
    prompt: bytes  # int32, at least one token
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

    start_step 0 begins with the weights in `model_dir`; a larger one restores the checkpoint
    `run_dir`/checkpoints/step_N first, and so does 0 in a run that begins from another one. Rank 0
    publishes version `start_step`.
    Ranks of several nodes have the first ones, as many as a node has, on the one that publishes.
    Example: StartRank("{...}", "models/tiny", 0, 2, "weights/.ranks-5f0c", "weights", "runs/a")
    """

    # a resolved Config
    config_json: str
    # a local directory or a hub id
    model_dir: str
    rank: int
    world: int
    # a file that the ranks make, where they find each other; unused when world is 1
    rendezvous: str
    publish_dir: str
    run_dir: str
    start_step: int = 0
    # an address of this machine by which engines on others reach the ranks; "" = none need to
    nccl_host: str = ""
    # one by which the ranks of other nodes reach those of this one; "" = all are on this machine
    host: str = ""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the gradients of this rank's micro-batches; answered by Accumulated.

    Every rank of a replica gets the same number of them, some of which may be empty. `is_last`: of
    a mini-batch, which is updated with next.
    Example: Accumulate(4, batches=((s0, s1), (s2,), ()))
    """

    step: int
    batches: tuple[MicroBatch, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """All samples of a mini-batch were sent, and the step has others: update; answered by Updated.

    The totals are as those of FinishStep, of this mini-batch alone. Example: UpdateWeights(4,
    num_responses=128, num_tokens=3956)
    """

    step: int
    num_responses: int
    # response tokens that are trained
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ClearStep:
    """A step begins anew: forget what was accumulated for it, and take back the updates of its
    mini-batches; answered by Cleared. Example: ClearStep(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class FinishStep:
    """All samples of the step were sent: update with its last mini-batch, and publish; answered by
    Published, then StepFinished; before them, on shared devices, by RankParked.

    The totals count all trained responses of that mini-batch on all ranks, also those without
    signal that were never sent. `step` counts from 0. Example: FinishStep(4, num_responses=256,
    num_tokens=7912, policy_version=5)
    """

    step: int
    num_responses: int
    # response tokens that are trained
    num_tokens: int
    # of the weights after the update
    policy_version: int


@dataclass(frozen=True, slots=True)
class ParkRank:
    """Give the device back in the middle of a step; answered by RankParked. Whatever has to do with
    gradients next takes it again. Example: ParkRank(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class EncodeDelta:
    """Find the difference between the last two versions; answered by DeltaMade. Example:
    EncodeDelta(5)."""

    # of the newer one, which `step` updates have made
    step: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint to the directory `path`, `step` updates being done; answered by Staged,
    and later by rank 0 with Saved or SaveFailed.

    With `export` then also `path`/hf, a model directory as transformers and vLLM read it; answered
    by Exported if the checkpoint was saved. Waits for the save before it, but not for its export.
    Example: Save(5, "runs/a/checkpoints/step_5", export=True)
    """

    step: int
    path: str
    export: bool = False


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """To rank 0: listen on `host` for the members of a broadcast group; answered by GroupOpened.
    Example: OpenGroup("10.0.0.1", Membership(...))."""

    host: str
    membership: Membership


@dataclass(frozen=True, slots=True)
class SendWeights:
    """To rank 0: send a published version to the group of this name, which forms first if it was
    just opened; answered by WeightsSent."""

    file: VersionFile
    group: str


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """To rank 0: stop listening, forming or sending, and leave the group. No answer but that of the
    command that it ends."""


RankCommand: TypeAlias = (
    StartRank
    | Accumulate
    | UpdateWeights
    | ClearStep
    | FinishStep
    | ParkRank
    | EncodeDelta
    | Save
    | OpenGroup
    | SendWeights
    | LeaveGroup
)


@dataclass(frozen=True, slots=True)
class Published:
    """From rank 0: all ranks have written this version. Sent before StepFinished."""

    file: VersionFile
    canary: Canary | None = None
    # of adapters: what they are beside
    base: VersionFile | None = None


@dataclass(frozen=True, slots=True)
class RankParked:
    """Nothing of the rank is on its device. `is_asked`: for ParkRank; else it is said before a
    version is. Example: RankParked(22_000_000_000, 1.1)."""

    # on the host for it, that are on the device otherwise
    num_bytes: int
    seconds: float
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class RankStarted:
    """Ready for the first step. Rank 0 brings the first version that was published."""

    # "cpu", "cuda:0"
    device: str
    start_s: float
    published: Published | None = None
    # its micro-batches are sequences back to back; else rows that are padded
    is_packed: bool = True
    # a line each on how this family is computed
    notes: tuple[str, ...] = ()
    # on shared devices: it starts so
    parked: RankParked | None = None


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Gradients of one Accumulate are added up. Example: Accumulated(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class Computing:
    """A sign of life: AT_ONCE micro-batches more are computed of a command that has many, as at the
    end of a mini-batch that could not begin before. No answer. Example: Computing(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class Updated:
    """The weights have moved by a mini-batch. Example: Updated(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is accumulated for the step. Example: Cleared(4)."""

    step: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The step is done; `metrics` are those of all ranks together, equal on each rank except for
    times."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeltaMade:
    """From rank 0 with the file, if the difference pays: it belongs to the daemon."""

    # of the version before, and of the newer one
    base: str = ""
    target: str = ""
    # has the digest of the difference itself
    file: VersionFile | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """What the checkpoint is to hold is copied: the rank goes on with other commands. `error`: why
    there will be none, in one line; nothing more is said of it then."""

    path: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """From rank 0: the checkpoint is complete and durable. Example:
    Saved("runs/a/checkpoints/step_5")."""

    path: str


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """From rank 0: there is no such checkpoint, for a reason in one line; the ranks go on as if
    they had not been told."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Exported:
    """From rank 0, after Saved. `error`: why there is no export, in one line."""

    path: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GroupOpened:
    """The members of the group meet at this address. `error`: why not, in one line."""

    address: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsSent:
    """The version was sent. `error`: why not, in one line; the group is over."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank ends; `reason` is one line. Its log has the traceback.

    `is_final`: one that is started again would fail in the same way, as for a model that cannot be
    loaded.
    """

    reason: str
    is_final: bool = False


RankEvent: TypeAlias = (
    RankStarted
    | Accumulated
    | Computing
    | Updated
    | Cleared
    | RankParked
    | Published
    | StepFinished
    | DeltaMade
    | Staged
    | Saved
    | SaveFailed
    | Exported
    | GroupOpened
    | WeightsSent
    | RankFailed
)

# Said of what goes on beside the commands.
SaveEvent: TypeAlias = Saved | SaveFailed | Exported

# Those with which a rank that is parked takes its device again.
TAKES_DEVICE = (Accumulate, UpdateWeights, FinishStep)

RANK_COMMANDS: Codec[RankCommand] = Codec(RankCommand)
RANK_EVENTS: Codec[RankEvent] = Codec(RankEvent)
