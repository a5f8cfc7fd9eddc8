"""Events that the core handles. Past participles; a closed union."""

from dataclasses import dataclass
from typing import TypeAlias

from lightrl.core.state import DrawnPrompt
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.episodes import EpisodeEnded, Observed
from lightrl.messages.nodes import Heartbeat, Hello
from lightrl.messages.responses import TokenChunk
from lightrl.messages.sharing import DevicesReleased
from lightrl.messages.training import ShardsTaken, StepDone
from lightrl.messages.weights import PublishWeights, WeightsEndpoint, WeightsFailed, WeightsReady


@dataclass(frozen=True, slots=True)
class NodeJoined:
    hello: Hello


# Messages of nodes that the core handles itself
NodeMessage: TypeAlias = (
    TokenChunk
    | Heartbeat
    | PublishWeights
    | WeightsEndpoint
    | WeightsReady
    | WeightsFailed
    | BroadcastStatus
    | StepDone
    | ShardsTaken
    | DevicesReleased
    | Observed
    | EpisodeEnded
)


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A node has sent a message."""

    node: str
    message: NodeMessage


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The connection to a node was lost, it violated the protocol, or its lease expired."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """The node takes no more work; its last tokens follow, and then NodeLeft."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """The node has reported that it leaves; not `ok` = it failed."""

    node: str
    reason: str
    ok: bool


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator has requested that this node leaves ("*": that the whole run stops)."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class PromptsDrawn:
    """The answer to DrawPrompts, in order."""

    prompts: tuple[DrawnPrompt, ...]


@dataclass(frozen=True, slots=True)
class ResponseScored:
    """The score of a finished attempt. `reward` None: no score; `failure` is the reason."""

    response: str
    attempt: int
    reward: float | None
    failure: str = ""
    # seconds of its slowest test, if the reward "code" accepts it
    slowest_s: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The trainer's checkpoint of `step` steps is durable."""

    step: int


@dataclass(frozen=True, slots=True)
class ShardLeft:
    """A TrainShard is durable and sent. Feed this event in a later turn than the Send."""

    step: int
    index: int


@dataclass(frozen=True, slots=True)
class ShellFailed:
    """The coordinator's shell cannot execute a command; `reason` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time returned by `next_deadline` has come."""


Event: TypeAlias = (
    NodeJoined
    | MessageArrived
    | NodeLost
    | NodeDraining
    | NodeLeft
    | DrainRequested
    | PromptsDrawn
    | ResponseScored
    | CheckpointWritten
    | ShardLeft
    | ShellFailed
    | TimerFired
)
