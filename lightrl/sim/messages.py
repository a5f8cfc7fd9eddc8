"""The messages that simulated nodes send. Owns the constant token buffer that all of them are
slices of."""

import math
from functools import lru_cache
from typing import cast

from lightrl.core.events import EndpointOpened, Event, NodeHeard, NodeJoined
from lightrl.messages.load import Load
from lightrl.messages.nodes import PROTOCOL, Heartbeat, Hello, Role
from lightrl.messages.responses import FinishReason, ResponseTokens, TokenChunk
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsEndpoint
from lightrl.sim.engine import SimDelta

TRAINER = "trainer"
DEVICE = "cuda"  # of all
IDLE = Load()


@lru_cache(maxsize=4096)
def blank(num_tokens: int) -> bytes:
    """So many int32 or float32 zeros: every simulated token is token 0 with logprob 0."""
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
    """`delta_bytes`: of the difference to the version before; 0 = there is none."""
    digest, deltas = digest_of(policy_version), ()
    if delta_bytes and policy_version:
        base = digest_of(policy_version - 1)
        deltas = (DeltaOffer(base, digest, f"{base}-{digest}", 0, math.ceil(delta_bytes)),)
    return PublishWeights(policy_version, digest, math.ceil(num_bytes), 1, deltas=deltas)


def arrival(hello: Hello, num_workers: int = 0, load: Load = IDLE) -> tuple[Event, ...]:
    """All that a node says at first. `num_workers`: of its engine, each a member of its own in a
    broadcast group; 0 = it pulls. `load`: what its engine says of itself."""
    name = hello.node
    opened = EndpointOpened(name, WeightsEndpoint((f"{name}:1",), secret=name))
    heard = NodeHeard(name, Heartbeat(load, device=DEVICE, num_workers=num_workers))
    return NodeJoined(hello), opened, heard


def hello(
    name: str,
    incarnation: int,
    role: Role,
    host: str,
    slots: int = 0,
    is_preemptible: bool = False,
    shares: str = "",
) -> Hello:
    """A trainer's ranks begin parked; a rollout node has its devices first."""
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
