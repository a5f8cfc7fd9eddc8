"""Every message that crosses the wire between daemons, and nothing that stays inside one process.

Frozen dataclasses of plain types, so that they can be compared, printed and validated. Must import
nothing of LightRL outside `lightrl.messages`. Arrays travel as raw little-endian bytes: token ids
as int32, logprobs as float32 (`wire.pack_i32`, `wire.pack_f32`).

The types bound the length of each field and the range of numbers. wire.py checks the length that a
frame announces before it decodes what follows, so a frame costs a bounded multiple of its size,
whoever sent it. Checks beyond types are in transport/validate.py and daemon/admission.py.

Senders and receivers (node = any daemon, head = the coordinator's daemon):

    node -> head   Hello Heartbeat TokenChunk WeightsEndpoint PublishWeights WeightsReady
                   WeightsFailed BroadcastStatus ShardsTaken StepDone Checkpointed
                   DevicesReleased TrainerRelay Observed EpisodeEnded Drain Bye
    head -> node   Welcome Heartbeat Generate Abort TrainShard PublishWeights VersionTaken
                   SetDevices TrainerSet TrainerRelay BeginEpisode StepEpisode EndEpisode Drain
    tool -> head   Watch Drain              (lightrl status, top, drain, down)
    head -> tool   Snapshot
"""

from typing import TypeAlias

from lightrl.messages.broadcasts import BroadcastStatus, VersionTaken
from lightrl.messages.episodes import (
    BeginEpisode,
    EndEpisode,
    EpisodeEnded,
    Observed,
    StepEpisode,
)
from lightrl.messages.nodes import Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import Abort, Generate, TokenChunk
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.snapshot import Snapshot, Watch
from lightrl.messages.trainers import TrainerRelay, TrainerSet
from lightrl.messages.training import Checkpointed, ShardsTaken, StepDone, TrainShard
from lightrl.messages.weights import PublishWeights, WeightsEndpoint, WeightsFailed, WeightsReady

Message: TypeAlias = (
    Hello
    | Welcome
    | Heartbeat
    | Generate
    | Abort
    | TokenChunk
    | TrainShard
    | ShardsTaken
    | StepDone
    | Checkpointed
    | WeightsEndpoint
    | PublishWeights
    | WeightsReady
    | WeightsFailed
    | VersionTaken
    | BroadcastStatus
    | TrainerSet
    | TrainerRelay
    | SetDevices
    | DevicesReleased
    | BeginEpisode
    | StepEpisode
    | EndEpisode
    | Observed
    | EpisodeEnded
    | Drain
    | Bye
    | Watch
    | Snapshot
)
