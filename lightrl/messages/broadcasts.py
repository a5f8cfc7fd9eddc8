"""What is said about broadcasts of weights: who meets whom, who sends, and that it came as it left.

Under the rules of message.py. In this order, if all goes well:

    trainer PublishWeights -> head VersionTaken, OpenBroadcast -> trainer BroadcastOpened
    -> head JoinBroadcast (to the trainer and each member) -> all BroadcastJoined
    -> head SendBroadcast (to the trainer), PublishWeights with `group` (to members)
    -> trainer BroadcastSums -> head BroadcastSums (to members) -> members WeightsReady

The group stays for the next versions, which begin with SendBroadcast. BroadcastFailed of anybody is
its end.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from lightrl.messages.fields import MAX_SUMS, Count, Text, UInt64, Version, Word


@dataclass(frozen=True, slots=True)
class VersionTaken:
    """To the trainer: the coordinator knows this version and has decided how nodes get it. Said
    again when that changes, as when a broadcast fails that was announced: then all orders before it
    are void.

    Example: VersionTaken(5, broadcasts=True, wants_delta=False)
    """

    policy_version: Version
    # OpenBroadcast or SendBroadcast follows: nothing else should be begun before
    broadcasts: bool
    # nodes pull that have the version before
    wants_delta: bool


@dataclass(frozen=True, slots=True)
class OpenBroadcast:
    """To the trainer: rank 0 is to listen for the members of a new broadcast group; answered by
    BroadcastOpened, which may say why not. `epoch` numbers the groups of one coordinator."""

    epoch: Count


@dataclass(frozen=True, slots=True)
class BroadcastOpened:
    """Where the members of this group meet, and the name by which they know each other, used once.

    Host 0.0.0.0 stands for the one by which the receiver reaches the coordinator. `reason`: why
    nowhere. Example: BroadcastOpened(3, "7c1f...", "10.0.0.1:41873")
    """

    epoch: Count
    group: Word
    # "host:port"
    address: Word
    reason: Text = ""


@dataclass(frozen=True, slots=True)
class JoinBroadcast:
    """Become a member of this group, with all ranks or all workers of an engine; answered by
    BroadcastJoined or BroadcastFailed. Example: JoinBroadcast("7c1f...", "10.0.0.1:41873", 2, 2, 4,
    "gloo")
    """

    group: Word
    address: Word
    # of the receiver's first worker, the others follow it; 0 for the trainer
    rank: Count
    # of the trainer; they come before all others
    num_ranks: Count
    world: Count
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class BroadcastJoined:
    """All ranks of the trainer, or all workers of this node's engine, are in the group."""

    group: Word


@dataclass(frozen=True, slots=True)
class SendBroadcast:
    """To the trainer: send the newest version to the members of this group; answered by
    BroadcastSums or BroadcastFailed."""

    group: Word
    policy_version: Version


@dataclass(frozen=True, slots=True)
class BroadcastSums:
    """From the trainer, and passed on to the members: what was sent. They compare it with what they
    have got, see weights/broadcast/proof.py."""

    group: Word
    policy_version: Version
    # below 2^64
    sums: Annotated[tuple[UInt64, ...], Meta(max_length=MAX_SUMS)]


@dataclass(frozen=True, slots=True)
class BroadcastFailed:
    """This group is over, for a reason in one line; whoever was receiving is told to pull.
    `is_unreachable`: nobody answers this node at the trainer's address, group or no group."""

    group: Word
    reason: Text
    is_unreachable: bool = False
