"""Entries of the journal, in the order in which the core recorded them.

Owns the types of all entries. `recovery.recover` restores the run, without any node, from a
`SnapshotBegan` and all entries after it: entries do not contain the nodes of running responses,
which nodes report when they reconnect. The core emits entries as commands (`Record`); the shell
writes them.
"""

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from lightrl.core.events import PromptsDrawn, ResponseScored
from lightrl.core.nodes.cost_model import LearnedTimes
from lightrl.core.nodes.line_fit import LineFit
from lightrl.core.responses.length_predictor import Memory
from lightrl.core.rounds.backlog import Deferred
from lightrl.core.sharing.planner import PlannerMemory
from lightrl.core.state import DrawnPrompt, RoundKind, Turn
from lightrl.messages.episodes import EpisodeEnded
from lightrl.messages.responses import ResponseTokens
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import Canary, WeightsBase


@dataclass(slots=True)
class Counters:
    """Counts of the run so far, all shown to operators."""

    nodes_lost: int = 0
    # losses of engines that served the newest version
    engines_lost: int = 0
    # responses that resumed from their tokens on another node
    responses_moved: int = 0
    # those of them that were moved because another node is faster
    migrations: int = 0
    # late chunks of attempts that were given up
    chunks_ignored: int = 0
    # chunks before which tokens are missing
    holes: int = 0
    # chunks with a wrong version, digest or size; their sender counts as lost
    bad_chunks: int = 0
    rewards_failed: int = 0
    groups_dropped: int = 0
    # dropped groups with equal rewards (`race.has_zero_std`), replaced by dynamic sampling
    groups_flat: int = 0
    # each prompt counts at most once in an epoch
    prompts_put_off: int = 0
    # tokens accepted for training rounds
    rollout_tokens: int = 0
    eval_tokens: int = 0
    # tokens accepted from nodes, but never trained
    aborted_tokens: int = 0
    groups_trained: int = 0
    trained_responses: int = 0

    def count_tokens(self, num_tokens: int, are_for_eval: bool) -> None:
        if are_for_eval:
            self.eval_tokens += num_tokens
        else:
            self.rollout_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """The state of the rule "window", by kind of round."""

    seeds: dict[str, float] = field(default_factory=dict[str, float])
    # (nodes that share nothing, kind of round, seconds)
    known: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SharingMemory:
    """Measurements of shared devices. Example: SharingMemory(0.6, longest={"short": 4096})"""

    # mean seconds of a switch; 0 = unknown
    switch_s: float = 0.0
    # seconds of training, by tokens of a step
    training: LineFit = field(default_factory=LineFit)
    # tokens of the longest trained response of the last round, by kind
    longest: dict[str, int] = field(default_factory=dict[str, int])
    window: WindowMemory = field(default_factory=WindowMemory)


@dataclass(frozen=True, slots=True)
class SnapshotBegan:
    """The first entry of every journal segment: the state of a run without its open rounds. One
    entry for each deferred group follows, oldest first, since these groups hold tokens.

    Example: SnapshotBegan(step=3, num_drawn=96, version=3, digests={3: ("9f3a...",)})
    """

    # the name of this entry in journals
    TAG: ClassVar[str] = "Resumed"

    # optimizer steps done
    step: int = 0
    # prompts drawn over all epochs: the position in the data
    num_drawn: int = 0
    # prompts that were held back; the journal format requires this name
    spare: tuple[DrawnPrompt, ...] = ()
    last_cut: int = 0
    # the policy version evaluated last
    evaluated: int | None = None
    # the policy version published last
    version: int | None = None
    # of the newest versions, as in Fleet
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    canaries: dict[int, Canary] = field(default_factory=dict[int, Canary])
    # of the newest version, as in VersionPublished
    num_bytes: int = 0
    manifest_bytes: int = 0
    base: WeightsBase | None = None
    counters: Counters = field(default_factory=Counters)
    # of the length predictor
    memory: Memory = field(default_factory=Memory)
    # of the cost model
    learned: LearnedTimes = field(default_factory=LearnedTimes)
    # of the rule for shared devices
    sharing: SharingMemory = field(default_factory=SharingMemory)
    # of the planner of engine sizes
    planner: PlannerMemory = field(default_factory=PlannerMemory)
    # of right answers by prompt, as in GroupLifecycle
    slowest_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """A round that is open when a segment begins. `recovery.take_snapshot` then adds the responses
    that its groups had when they were deferred, its tokens and its scores."""

    # the name of this entry in journals
    TAG: ClassVar[str] = "RoundStood"

    step: int
    kind: RoundKind
    prompts_launched: int
    # in the order of their groups, with `held` empty
    prompts: tuple[Deferred, ...]
    is_closed: bool


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    """The end of the snapshot at the beginning of a segment; events follow."""

    # the name of this entry in journals
    TAG: ClassVar[str] = "Restated"


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round was opened. Earlier entries determine its content; PromptsDrawn entries follow."""

    step: int
    kind: RoundKind


@dataclass(frozen=True, slots=True)
class TokensTaken:
    """Accepted tokens of one policy version; readers skip tokens of an item that are known."""

    version: int
    items: tuple[ResponseTokens, ...]


@dataclass(frozen=True, slots=True)
class ObservationTaken:
    """An observation of an episode: its tokens were inserted."""

    response: str
    incarnation: int
    turn: Turn
    # int32
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The trainer published a version; the fields are those of PublishWeights."""

    version: int
    digest: str
    portions: tuple[int, ...] = ()
    # sizes with which nodes can pull the version from each other while the trainer is away
    num_bytes: int = 0
    manifest_bytes: int = 0
    canary: Canary | None = None
    base: WeightsBase | None = None
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionRetrained:
    """A version was trained again after a restart of the trainer, with different bits, and replaces
    the version with digest `replaced`. Tokens sampled under the replaced version are kept.

    Example: VersionRetrained(7, "9f3a...", "a01c...", largest=3e-6, mean=4e-7)
    """

    version: int
    replaced: str
    digest: str
    # absolute differences of the canary's logprobs, in nats; None = no canary to compare
    largest: float | None = None
    mean: float | None = None
    # as in VersionPublished
    num_bytes: int = 0
    manifest_bytes: int = 0
    canary: Canary | None = None
    base: WeightsBase | None = None


@dataclass(frozen=True, slots=True)
class ShardSent:
    """A shard that is sent to the trainer once this entry is durable; index 0 restarts its step."""

    shard: TrainShard


@dataclass(frozen=True, slots=True)
class ShellNote:
    """Data of the shell, which the core does not read. Example: ShellNote(b'{"evals": []}')."""

    # the name of this entry in journals
    TAG: ClassVar[str] = "Noted"

    data: bytes


LogEntry: TypeAlias = (
    SnapshotBegan
    | Deferred
    | RoundSnapshot
    | SnapshotEnded
    | RoundOpened
    | PromptsDrawn
    | TokensTaken
    | ObservationTaken
    | EpisodeEnded
    | ResponseScored
    | VersionPublished
    | VersionRetrained
    | ShardSent
    | StepDone
    | ShellNote
)
