"""Messages about a step between the coordinator and a trainer node: its groups and its results.

Under the rules of message.py. Messages between trainer nodes are in trainers.py.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from lightrl.messages.fields import (
    MAX_GROUPS,
    RESPONSES,
    Bits,
    Int32,
    Metrics,
    Name,
    Tokens,
    Version,
)
from lightrl.messages.responses import FinishReason


@dataclass(frozen=True, slots=True)
class TrainResponse:
    """One scored response to train on.

    Example: TrainResponse("p7@0#3", ids, logprobs, 1.0, "stop")
    """

    response: Name
    # int32
    token_ids: Tokens
    # float32
    rollout_logprobs: Tokens
    reward: float
    finish_reason: FinishReason
    # a bit for each token, 1 = it is trained, see `loss_mask`; "" = all are
    loss_mask: Bits = b""
    # tokens at its beginning that were sampled by versions before the shard's
    num_stale: Int32 = 0


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A whole group: all that the advantages of one prompt need.

    Example: TrainGroup("p7@0", ids, (r0, r1))
    """

    group: Name
    # int32
    prompt: Tokens
    responses: Annotated[tuple[TrainResponse, ...], RESPONSES]
    # the update of its step that it belongs to; the groups of one follow each other
    mini_batch: Int32 = 0


@dataclass(frozen=True, slots=True)
class TrainShard:
    """Groups of one step, streamed while others still generate; identified by (step, index).

    `policy_version` is the version that sampled them and that the trainer must hold. The shard with
    `last` set closes the step, `num_groups` then counts the groups of all its shards.
    Example: TrainShard(step=4, index=2, policy_version=4, groups=(g,), last=False)
    """

    step: Version
    index: Int32
    policy_version: Version
    groups: Annotated[tuple[TrainGroup, ...], Meta(max_length=MAX_GROUPS)]
    last: bool = False
    num_groups: Int32 = 0
    # accumulate exactly these groups together, on this replica: to reproduce the same bits
    alone: bool = False
    replica: Int32 = 0


@dataclass(frozen=True, slots=True)
class ShardsTaken:
    """The trainer has taken all shards up to `index` out of its queue, which has room for more.

    Example: ShardsTaken(4, 2)
    """

    step: Version
    index: Int32


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint of `step` steps is durable; no step before `oldest` will be trained again.

    If it turns out to be damaged, the trainer restarts from an older one.
    Example: Checkpointed(20, 10).
    """

    step: Version
    # steps done in the oldest checkpoint that is kept; 0 = in the model itself
    oldest: Version = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """The optimizer step is done and its version published.

    Example: StepDone(4, 5, {"loss/policy": 0.1})
    """

    step: Version
    policy_version: Version
    metrics: Metrics
