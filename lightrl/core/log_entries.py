"""What must outlive the coordinator: entries, in the order in which the core took them.

Owns the vocabulary of the journal. From a `SnapshotBegan` and all entries after it
`recovery.recover` makes the same run again, without any node: where work ran is no entry, nodes
say so themselves when they come back. Entries are emitted as commands (`Record`); who writes them,
and when, is the shell's business.
"""

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from lightrl.core.backlog import PutOff
from lightrl.core.counters import Counters
from lightrl.core.events import PromptsDrawn, ResponseScored
from lightrl.core.length_predictor import Memory
from lightrl.core.planner import PlannerMemory
from lightrl.core.sides_memory import SidesMemory
from lightrl.core.state import DrawnPrompt, RoundKind
from lightrl.core.worth import Learned
from lightrl.messages.responses import ResponseTokens
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import Canary, WeightsBase


@dataclass(frozen=True, slots=True)
class SnapshotBegan:
    """Where a run stands, its open rounds left out: the first entry of every segment of a journal.
    The groups that were put off follow, one entry each, oldest first: they hold tokens.

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
    # of what nodes are worth
    learned: Learned = field(default_factory=Learned)
    # of devices that change sides
    sides: SidesMemory = field(default_factory=SidesMemory)
    # of engines of several sizes
    planner: PlannerMemory = field(default_factory=PlannerMemory)
    # as Judge has it
    slowest_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """A round that is open when a segment begins. What an earlier round held of its groups follows,
    its tokens and its scores: `recovery.take_snapshot`."""

    # in journals
    TAG: ClassVar[str] = "RoundStood"

    step: int
    kind: RoundKind
    prompts_launched: int
    # in the order of their groups, without what is held of them
    prompts: tuple[PutOff, ...]
    is_closed: bool


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    """What stood when the segment began is told; from here on things happen."""

    # in journals
    TAG: ClassVar[str] = "Restated"


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """What it holds follows from the entries before; its prompts come as PromptsDrawn."""

    step: int
    kind: RoundKind


@dataclass(frozen=True, slots=True)
class TokensTaken:
    """Tokens of one policy version that were accepted; of an item, what is known is skipped."""

    version: int
    items: tuple[ResponseTokens, ...]


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """A version appeared at the trainer; all of it as in PublishWeights."""

    version: int
    digest: str
    portions: tuple[int, ...] = ()
    # so that nodes can pull it from each other before the trainer is back
    num_bytes: int = 0
    manifest_bytes: int = 0
    canary: Canary | None = None
    base: WeightsBase | None = None
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionRetrained:
    """A version was trained again after a restart of the trainer, with other bits, and replaces the
    one with digest `replaced`. Tokens sampled under that one are kept.

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
    """A trainer gets it when this is durable, not before. Index 0 begins its step anew."""

    shard: TrainShard


@dataclass(frozen=True, slots=True)
class ShellNote:
    """What the shell wants to find again; the core does not read it. Example: ShellNote(b'{"evals":
    []}')."""

    # in journals
    TAG: ClassVar[str] = "Noted"

    data: bytes


LogEntry: TypeAlias = (
    SnapshotBegan
    | PutOff
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
