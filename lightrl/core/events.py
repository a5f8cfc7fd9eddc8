"""Events that the core handles. Past participles; a closed union."""

from dataclasses import dataclass
from typing import TypeAlias

from lightrl.core.state import DrawnPrompt
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.nodes import Heartbeat, Hello
from lightrl.messages.responses import TokenChunk
from lightrl.messages.sharing import DevicesReleased
from lightrl.messages.training import ShardsTaken, StepDone
from lightrl.messages.weights import PublishWeights, WeightsEndpoint, WeightsFailed, WeightsReady


@dataclass(frozen=True, slots=True)
class NodeJoined:
    hello: Hello


@dataclass(frozen=True, slots=True)
class HeartbeatArrived:
    """A node has sent a heartbeat."""

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
class TokensArrived:
    node: str
    chunk: TokenChunk


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
class WeightsPublished:
    """The trainer has published a complete version."""

    node: str
    message: PublishWeights


@dataclass(frozen=True, slots=True)
class EndpointOpened:
    """A node serves its weights at this endpoint."""

    node: str
    endpoint: WeightsEndpoint


@dataclass(frozen=True, slots=True)
class SourceReported:
    """A node reports that it received wrong bytes from a source."""

    node: str
    report: WeightsFailed


@dataclass(frozen=True, slots=True)
class BroadcastReported:
    """The trainer or a member reports on a broadcast."""

    node: str
    status: BroadcastStatus


@dataclass(frozen=True, slots=True)
class WeightsConfirmed:
    """The engine of a node serves a version, whose bytes match the digest."""

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
    """The trainer's checkpoint of `step` steps is durable."""

    step: int


@dataclass(frozen=True, slots=True)
class ShardLeft:
    """A TrainShard is durable and sent. Feed this event in a later turn than the Send."""

    step: int
    index: int


@dataclass(frozen=True, slots=True)
class ShardsDelivered:
    """The trainer has accepted a shard, and those before it, for training."""

    node: str
    taken: ShardsTaken


@dataclass(frozen=True, slots=True)
class ShellFailed:
    """The coordinator's shell cannot execute a command; `reason` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time returned by `next_deadline` has come."""


@dataclass(frozen=True, slots=True)
class NodeReleased:
    """A rollout node has released the devices that it shares."""

    node: str
    message: DevicesReleased


@dataclass(frozen=True, slots=True)
class TrainerParked:
    """The ranks of a trainer node have released its devices, possibly before it publishes."""

    node: str
    message: DevicesReleased


Event: TypeAlias = (
    NodeJoined
    | HeartbeatArrived
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
