"""Entries of the journal, in the order in which the core recorded them.

Owns the vocabulary of the journal. From a `SnapshotBegan` and all entries after it
`recovery.recover` restores the run without any node: entries do not contain the places of work,
which nodes report when they reconnect. Entries are emitted as commands (`Record`); the shell writes
them.
"""

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from lightrl.core.events import PromptsDrawn, ResponseScored
from lightrl.core.nodes.cost_model import Observed
from lightrl.core.nodes.line_fit import LineFit
from lightrl.core.responses.length_predictor import Memory
from lightrl.core.rounds.backlog import Deferred
from lightrl.core.sharing.planner import PlannerMemory
from lightrl.core.state import DrawnPrompt, RoundKind
from lightrl.messages.responses import ResponseTokens
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import Canary, WeightsBase


@dataclass(slots=True)
class Counters:
    """Counts of the run so far, all shown to operators."""

    nodes_lost: int = 0
    # of nodes that served the newest version
    engines_lost: int = 0
    # resumed elsewhere from their tokens
    responses_moved: int = 0
    # of these, because another node is faster
    migrations: int = 0
    # of attempts given up
    chunks_ignored: int = 0
    # chunks with tokens missing before them
    holes: int = 0
    # wrong version, digest or size; the sender is lost
    bad_chunks: int = 0
    rewards_failed: int = 0
    groups_dropped: int = 0
    # of these, with equal rewards (`race.has_zero_std`): replaced by dynamic sampling
    groups_flat: int = 0
    # a prompt at most once in an epoch
    prompts_put_off: int = 0
    # accepted for training rounds
    rollout_tokens: int = 0
    eval_tokens: int = 0
    # accepted from nodes, but never trained
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
    """State of the rule "window", by kind of round."""

    seeds: dict[str, float] = field(default_factory=dict[str, float])
    # (nodes that share nothing, kind of round, seconds)
    known: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SharingMemory:
    """Example: SharingMemory(0.6, longest={"short": 4096})"""

    # mean seconds of a switch; 0 = unknown
    switch_s: float = 0.0
    # seconds of the trainer, by tokens of a step
    training: LineFit = field(default_factory=LineFit)
    # tokens of the longest trained response of the last round, by kind
    longest: dict[str, int] = field(default_factory=dict[str, int])
    window: WindowMemory = field(default_factory=WindowMemory)


@dataclass(frozen=True, slots=True)
class SnapshotBegan:
    """State of a run without its open rounds: the first entry of every segment of a journal. The
    groups that were deferred follow, one entry each, oldest first: they hold tokens.

    Example: SnapshotBegan(step=3, num_drawn=96, version=3, digests={3: ("9f3a...",)})
    """

    # in journals
    TAG: ClassVar[str] = "Resumed"

    # optimizer steps done
    step: int = 0
    # prompts, over all epochs: the position in the data
    num_drawn: int = 0
    # prompts that were held back; the name is that of the format
    spare: tuple[DrawnPrompt, ...] = ()
    last_cut: int = 0
    # the policy version evaluated last
    evaluated: int | None = None
    # the one published last
    version: int | None = None
    # of the newest versions, as Fleet has them
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    canaries: dict[int, Canary] = field(default_factory=dict[int, Canary])
    # of the newest one, as in VersionPublished
    num_bytes: int = 0
    manifest_bytes: int = 0
    base: WeightsBase | None = None
    counters: Counters = field(default_factory=Counters)
    # of lengths
    memory: Memory = field(default_factory=Memory)
    # of the cost model
    learned: Observed = field(default_factory=Observed)
    # of devices that change sides
    sharing: SharingMemory = field(default_factory=SharingMemory)
    # of engines of several sizes
    planner: PlannerMemory = field(default_factory=PlannerMemory)
    # of right answers, as GroupLifecycle has it
    slowest_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """A round that is open when a segment begins. The responses that its groups had when they were
    deferred, its tokens and its scores follow: `recovery.take_snapshot`."""

    # in journals
    TAG: ClassVar[str] = "RoundStood"

    step: int
    kind: RoundKind
    prompts_launched: int
    # in the order of their groups, with `held` empty
    prompts: tuple[Deferred, ...]
    is_closed: bool


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    """The snapshot at the beginning of the segment is complete; events follow."""

    # in journals
    TAG: ClassVar[str] = "Restated"


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round was opened. Earlier entries determine its content; PromptsDrawn follow."""

    step: int
    kind: RoundKind


@dataclass(frozen=True, slots=True)
class TokensTaken:
    """Accepted tokens of one policy version; known tokens of an item are skipped."""

    version: int
    items: tuple[ResponseTokens, ...]


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """A version was published by the trainer; fields as in PublishWeights."""

    version: int
    digest: str
    portions: tuple[int, ...] = ()
    # so that nodes can pull the version from each other before the trainer returns
    num_bytes: int = 0
    manifest_bytes: int = 0
    canary: Canary | None = None
    base: WeightsBase | None = None
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionRetrained:
    """A version was trained again after a restart of the trainer, with other bits, and replaces the
    version with digest `replaced`. Tokens sampled under the replaced version are kept.

    Example: VersionRetrained(7, "9f3a...", "a01c...", largest=3e-6, mean=4e-7)
    """

    version: int
    replaced: str
    digest: str
    # absolute differences of the canary's logprobs, in nats; None = there was no canary to compare
    largest: float | None = None
    mean: float | None = None
    # as in VersionPublished
    num_bytes: int = 0
    manifest_bytes: int = 0
    canary: Canary | None = None
    base: WeightsBase | None = None


@dataclass(frozen=True, slots=True)
class ShardSent:
    """A shard, sent to the trainer once this entry is durable. Index 0 restarts its step."""

    shard: TrainShard


@dataclass(frozen=True, slots=True)
class ShellNote:
    """Data of the shell, which the core does not read. Example: ShellNote(b'{"evals": []}')."""

    # in journals
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
    | ResponseScored
    | VersionPublished
    | VersionRetrained
    | ShardSent
    | StepDone
    | ShellNote
)
