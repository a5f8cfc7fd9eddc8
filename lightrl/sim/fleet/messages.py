"""The messages that simulated nodes send."""

import math
from functools import lru_cache
from typing import cast

from lightrl.core.events import Event, MessageArrived, NodeJoined
from lightrl.messages.load import Load
from lightrl.messages.nodes import PROTOCOL, Heartbeat, Hello, Role
from lightrl.messages.responses import FinishReason, ResponseTokens, TokenChunk
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsEndpoint
from lightrl.sim.fleet.engine import SimDelta

TRAINER = "trainer"
DEVICE = "cuda"
IDLE = Load()


@lru_cache(maxsize=4096)
def blank(num_tokens: int) -> bytes:
    """Return int32 or float32 zeros: every simulated token is token 0 with logprob 0."""
    return bytes(4 * num_tokens)


def chunk_of(policy_version: int, deltas: list[SimDelta]) -> TokenChunk:
    items = tuple(
        ResponseTokens(
            d.response,
            d.attempt,
            d.offset,
            blank(d.count),
            blank(d.count),
            cast("FinishReason", d.finished),
        )
        for d in deltas
    )
    return TokenChunk(policy_version, digest_of(policy_version), items)


def digest_of(policy_version: int) -> str:
    return f"version-{policy_version}"


def version_of(digest: str) -> int:
    return int(digest.rpartition("-")[2])


def publication(policy_version: int, num_bytes: float, delta_bytes: float) -> PublishWeights:
    """`delta_bytes`: of the delta to the version before; 0 = there is none."""
    digest, deltas = digest_of(policy_version), ()
    if delta_bytes and policy_version:
        base = digest_of(policy_version - 1)
        deltas = (DeltaOffer(base, digest, f"{base}-{digest}", 0, math.ceil(delta_bytes)),)
    return PublishWeights(policy_version, digest, math.ceil(num_bytes), 1, deltas=deltas)


def arrival(hello: Hello, num_workers: int = 0, load: Load = IDLE) -> tuple[Event, ...]:
    """Return the events of a node that joins. `num_workers`: of its engine, each a member of a
    broadcast group; 0 = it pulls."""
    name = hello.node
    opened = MessageArrived(name, WeightsEndpoint((f"{name}:1",), secret=name))
    heartbeat = MessageArrived(name, Heartbeat(load, device=DEVICE, num_workers=num_workers))
    return NodeJoined(hello), opened, heartbeat


def hello(
    name: str,
    incarnation: int,
    role: Role,
    host: str,
    slots: int = 0,
    is_preemptible: bool = False,
    shares: str = "",
) -> Hello:
    """A trainer's ranks start parked; a rollout node has its devices first."""
    return Hello(
        name,
        incarnation,
        (role,),
        PROTOCOL,
        pid=1,
        host=host,
        slots=slots,
        is_preemptible=is_preemptible,
        shares=shares,
        is_released=role == "trainer",
    )
