"""Commands of the core to its shell, and the outbox that collects the commands.

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
    """Send this node a Welcome with the config and the model's files."""

    node: str


@dataclass(frozen=True, slots=True)
class DrawPrompts:
    """Answer with PromptsDrawn: the next `count` prompts of the data, or the whole evaluation set.

    A round may draw more than once.
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
    """All groups are accepted, deferred or dropped. Read metrics now: the step frees the tokens."""

    round: Round


@dataclass(frozen=True, slots=True)
class CloseStep:
    """Step `step` is trained and its version served. The three periods are contiguous.

    In asynchronous mode a step begins at the end of the previous step and ends when it is trained:
    no round waits for the new version then, and weights_s is almost 0.
    """

    step: int
    # from the opening of its round until it closed
    rollout_s: float
    # from then on until the new version was published; the rest of training was hidden
    train_s: float
    # from then on until a node served it and the next round could open
    weights_s: float
    # of the trainer
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Record:
    """Write an entry; a TrainShard must not be sent before the entries ahead of it are durable."""

    entry: LogEntry


@dataclass(frozen=True, slots=True)
class ReplayShards:
    """Send the trainer the unchanged shards of a step that it trains again; else ShellFailed.

    Skipped if the trainer has sent another Hello since: `hello` is TrainerFeed.num_hellos then.
    """

    node: str
    step: int
    hello: int


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the operator; a warning reports a problem that the run survives."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Provide `wanted` preemptible nodes."""

    wanted: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; no command follows."""

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
    """The commands that result from the current event, in order.

    The core has one outbox. Each part of the core adds commands; the driver of the core drains it.
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
        """Remove and return all commands."""
        commands, self._commands = self._commands, []
        return commands
