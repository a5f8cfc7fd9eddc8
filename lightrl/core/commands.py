"""All that the core can ask of its shell, and the outbox that all of it goes through.

Commands are imperatives and a closed union.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightrl.core.log_entries import LogEntry
from lightrl.core.state import Response, Round, RunState
from lightrl.messages.message import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a node; if it is not connected, feed NodeLost back."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True)
class Admit:
    """Welcome this node with the config and the model's files."""

    node: str


@dataclass(frozen=True, slots=True)
class DrawPrompts:
    """Answer with PromptsDrawn: the next `count` prompts of the data, or the whole evaluation set.

    One round may ask more than once.
    """

    source: Literal["train", "eval"]
    count: int


@dataclass(frozen=True, slots=True)
class ScoreResponse:
    """Compute the reward of a finished response; answer with ResponseScored."""

    response: Response
    # prompt id
    prompt: str
    source: Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Every group is accepted, put off or dropped. Read figures now: tokens go with the step."""

    round: Round


@dataclass(frozen=True, slots=True)
class CloseStep:
    """Step `step` is trained and its version served. The three times follow each other without a
    gap.

    In asynchronous mode a step begins where the one before it ended and ends when it is trained:
    nobody waits for the new version then, and weights_s is next to nothing.
    """

    step: int
    # from the opening of its round until it closed
    rollout_s: float
    # from then on until the new version was published; the rest of training was hidden
    train_s: float
    # from then on until a node served it and the next round could open
    weights_s: float
    # the trainer's
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Record:
    """Write this down; a TrainShard must not leave before the entries ahead of it are durable."""

    entry: LogEntry


@dataclass(frozen=True, slots=True)
class ReplayShards:
    """Send the trainer the shards of a step that it trains again, as they were; else ShellFailed.

    Not if it has said hello again by then: `hello` is TrainerFeed.num_hellos as it was.
    """

    node: str
    step: int
    hello: int


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the operator; a warning tells what went wrong and is survived."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """So many preemptible nodes are worth having: see to it that they are there."""

    wanted: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; nothing follows."""

    # finished, stopped or failed
    state: RunState
    reason: str


Command: TypeAlias = (
    Send
    | Admit
    | DrawPrompts
    | ScoreResponse
    | CloseRound
    | CloseStep
    | Record
    | ReplayShards
    | Report
    | Scale
    | Finish
)


class Outbox:
    """What is to be done because of the event at hand, in order.

    The core has one. Each of its parts adds to it; whoever drives the core takes it all.
    """

    def __init__(self) -> None:
        self._commands: list[Command] = []

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def send(self, node: str, message: Message) -> None:
        self._commands.append(Send(node, message))

    def record(self, entry: LogEntry) -> None:
        self._commands.append(Record(entry))

    def score(self, response: Response) -> None:
        group = response.group
        self._commands.append(ScoreResponse(response, group.prompt.id, group.round.source))

    def report(self, text: str) -> None:
        self._commands.append(Report(text))

    def warn(self, text: str) -> None:
        self._commands.append(Report(text, is_warning=True))

    def drain(self) -> list[Command]:
        """All that was added; the outbox is empty again."""
        commands, self._commands = self._commands, []
        return commands
