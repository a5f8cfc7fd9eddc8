"""Messages about versions of the weights: which exist, which nodes serve and which have them.

Under the rules of message.py. Broadcasts are in broadcasts.py.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from lightrl.messages.broadcasts import BroadcastGroup
from lightrl.messages.fields import (
    MAX_ADDRESSES,
    MAX_DELTAS,
    MAX_SOURCES,
    RESPONSES,
    Count,
    Int32,
    Name,
    Text,
    Tokens,
    Version,
    Word,
)


@dataclass(frozen=True, slots=True)
class WeightsProgress:
    """The progress of a pull. Example: WeightsProgress(4, 7, 15, 3)."""

    policy_version: Version
    # proved
    num_bytes: Count
    total_bytes: Count
    # that it pulls from
    num_sources: Count = 0


@dataclass(frozen=True, slots=True)
class WeightsEndpoint:
    """Where this node serves the weights that it holds, and the secret from which pull tickets are
    derived. Sent after each welcome.

    A host 0.0.0.0 means the host by which the receiver reaches the coordinator. Example:
    WeightsEndpoint(("10.0.0.1:41873",), "c0ffee...")
    """

    # "host:port", any of them
    addresses: Annotated[tuple[Word, ...], Meta(max_length=MAX_ADDRESSES)]
    secret: Word


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A node from which a version can be pulled, as far as that node has it.

    `ticket` is for the receiver alone (tickets.pull_ticket). Example: WeightsSource("rollout-0",
    ("10.0.0.2:40119",), "77e0...")
    """

    node: Name
    addresses: Annotated[tuple[Word, ...], Meta(max_length=MAX_ADDRESSES)]
    ticket: Word


@dataclass(frozen=True, slots=True)
class DeltaOffer:
    """The difference between two versions, available from the sources of the second. Digests of the
    versions, and of the difference's own manifest.

    Example: DeltaOffer("9f3a...", "a01c...", "77aa...", manifest_bytes=4210, num_bytes=91022)
    """

    base: Word
    target: Word
    digest: Word
    manifest_bytes: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class WeightsBase:
    """The base model of adapters: pulled once, like a version. Sources as in PublishWeights, with
    tickets for version 0, so that they remain valid for every later version.

    Example: WeightsBase("4b7e...", 2112512, 8190, sources=(WeightsSource(...),))
    """

    digest: Word
    num_bytes: Count
    manifest_bytes: Count
    sources: Annotated[tuple[WeightsSource, ...], Meta(max_length=MAX_SOURCES)] = ()


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed text and the logprobs that the trainer gives its tokens.

    Example: Canary(<32 int32>, <31 float32>)
    """

    # int32
    token_ids: Tokens
    # float32, of each token but the first, given those before
    logprobs: Tokens
    # in which they were computed
    dtype: Word = "float32"


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """A complete version can be pulled from `sources`, its manifest included.

    The trainer names no sources; the coordinator does so for each node. The first one after a
    trainer's hello has the version from which it continues: it trains that step next.

    Example: PublishWeights(4, "9f3a...", 2112512, 8190, sources=(WeightsSource(...),),
    portions=(3, 29))
    """

    policy_version: Version
    # of the manifest's bytes, hex
    digest: Word
    # of the version's file
    num_bytes: Count
    manifest_bytes: Count
    # in the order in which they should be asked
    sources: Annotated[tuple[WeightsSource, ...], Meta(max_length=MAX_SOURCES)] = ()
    # from the trainer: the difference to the version before; to a node: a chain that ends here
    deltas: Annotated[tuple[DeltaOffer, ...], Meta(max_length=MAX_DELTAS)] = ()
    canary: Canary | None = None
    # groups accumulated at a time for it, in order; () = loaded, not trained. By which replica of
    # the model each; () = there is one
    portions: Annotated[tuple[Int32, ...], RESPONSES] = ()
    replicas: Annotated[tuple[Int32, ...], RESPONSES] = ()
    # the broadcast group by which the node gets it; None = it pulls. Sources have the manifest
    group: BroadcastGroup | None = None
    # the version is adapters: only together with this it is weights
    base: WeightsBase | None = None


@dataclass(frozen=True, slots=True)
class WeightsReady:
    """The engine serves this version; its bytes were proved to have `digest`.

    Example: WeightsReady(4, "9f3a...", num_bytes=2112512, pull_s=0.01, load_s=0.03)
    """

    policy_version: Version
    digest: Word
    # that were transferred
    num_bytes: Count = 0
    pull_s: float = 0.0
    # during which the engine sampled nothing
    load_s: float = 0.0
    # of num_bytes: from other rollout nodes; as differences
    peer_bytes: Count = 0
    delta_bytes: Count = 0
    # largest difference of a logprob to the trainer's; None = not compared
    canary_diff: float | None = None
    # until it had been received, if it came by broadcast: then there is no file of it
    broadcast_s: float | None = None


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    """A version cannot be served, or not any more; with `source`: this node sent wrong bytes of it,
    and the sender continues with other sources.

    Example: WeightsFailed(4, "bucket 3: digest differs", source="rollout-3")
    """

    policy_version: Version
    reason: Text
    source: Word = ""
