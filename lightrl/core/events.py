"""All that can happen to a run, as the core is told of it. Past participles; a closed union."""

from dataclasses import dataclass
from typing import TypeAlias

from lightrl.core.state import DrawnPrompt
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.nodes import Heartbeat, Hello
from lightrl.messages.responses import TokenChunk
from lightrl.messages.sharing import EngineAsleep, TrainerSuspended
from lightrl.messages.training import ShardsTaken, StepDone
from lightrl.messages.weights import (
    BadSource,
    PublishWeights,
    WeightsEndpoint,
    WeightsFailed,
    WeightsReady,
)


@dataclass(frozen=True, slots=True)
class NodeJoined:
    hello: Hello


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """A heartbeat."""

    node: str
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class NodeLost:
    """Its connection is gone, it broke the protocol, or its lease ran out."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """The node takes no more work; its last tokens follow, and then NodeLeft."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """The node said good-bye; not `ok` = it failed."""

    node: str
    reason: str
    ok: bool


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants this node gone ("*": the whole run stopped)."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class PromptsDrawn:
    """The answer to DrawPrompts, in order."""

    prompts: tuple[DrawnPrompt, ...]


@dataclass(frozen=True, slots=True)
class TokensArrived:
    node: str
    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class ResponseScored:
    """Of the attempt that finished. `reward` None: there is no score, and `failure` says why."""

    response: str
    attempt: int
    reward: float | None
    failure: str = ""
    # seconds of its slowest test, if it is a right answer to the reward "code"
    slowest_s: float | None = None


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """The trainer offers a complete version."""

    node: str
    message: PublishWeights


@dataclass(frozen=True, slots=True)
class EndpointOpened:
    """A node serves what it holds of the weights there."""

    node: str
    endpoint: WeightsEndpoint


@dataclass(frozen=True, slots=True)
class SourceReported:
    """A node reports that it received wrong bytes from a source."""

    node: str
    report: BadSource


@dataclass(frozen=True, slots=True)
class BroadcastReported:
    """The trainer or a member reports on a broadcast."""

    node: str
    status: BroadcastStatus


@dataclass(frozen=True, slots=True)
class WeightsConfirmed:
    """A node's engine serves a version; its bytes were proved to have the digest."""

    node: str
    ready: WeightsReady


@dataclass(frozen=True, slots=True)
class WeightsRefused:
    node: str
    failed: WeightsFailed


@dataclass(frozen=True, slots=True)
class StepTrained:
    node: str
    done: StepDone


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The trainer's, of so many steps, is durable."""

    step: int


@dataclass(frozen=True, slots=True)
class ShardLeft:
    """A TrainShard is durable and on its way. Feed it in a later turn than it was made in."""

    step: int
    index: int


@dataclass(frozen=True, slots=True)
class ShardsDelivered:
    """The trainer has taken a shard, and those before it, to train on."""

    node: str
    taken: ShardsTaken


@dataclass(frozen=True, slots=True)
class ShellFailed:
    """The coordinator's shell cannot do what it must; `reason` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time that `next_deadline` named has come."""


@dataclass(frozen=True, slots=True)
class NodeReleased:
    """A rollout node has given back the devices that it shares."""

    node: str
    message: EngineAsleep


@dataclass(frozen=True, slots=True)
class TrainerParked:
    """The ranks of a trainer node have given back its devices, or had before it publishes."""

    node: str
    message: TrainerSuspended


Event: TypeAlias = (
    NodeJoined
    | NodeHeard
    | NodeLost
    | NodeDraining
    | NodeLeft
    | DrainRequested
    | PromptsDrawn
    | TokensArrived
    | ResponseScored
    | WeightsPublished
    | EndpointOpened
    | SourceReported
    | BroadcastReported
    | WeightsConfirmed
    | WeightsRefused
    | StepTrained
    | CheckpointWritten
    | ShardLeft
    | ShardsDelivered
    | NodeReleased
    | TrainerParked
    | ShellFailed
    | TimerFired
)
