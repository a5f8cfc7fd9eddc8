"""The messages of broadcasts of weights: the group, the trainer's order, and how it goes.

Under the rules of message.py. In this order, if all goes well:

    trainer PublishWeights -> head VersionTaken with an order
    -> trainer BroadcastStatus with an address, unless the group exists
    -> head PublishWeights with `group` (to members) -> members WeightsReady

The group stays for the next versions. A BroadcastStatus with a reason ends it.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightrl.messages.fields import Count, Text, Version, Word

Backend: TypeAlias = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """A broadcast group, and the receiver's rank in it; the trainer's rank 0 sends.

    Host 0.0.0.0 means the one by which the receiver reaches the coordinator. Example:
    BroadcastGroup("7c1f...", "10.0.0.1:41873", 1, 3, "gloo")
    """

    # known to the members only
    name: Word
    # "host:port" of the trainer's store
    address: Word
    # of the receiver's first worker, the others follow it
    rank: Count
    world: Count
    backend: Backend


@dataclass(frozen=True, slots=True)
class BroadcastOrder:
    """To the trainer: send the version to this group; "" = open a new one of this size."""

    group: Word
    world: Count
    backend: Backend


@dataclass(frozen=True, slots=True)
class VersionTaken:
    """To the trainer: the coordinator has decided how nodes get this version. Sent again without a
    broadcast when that fails: the trainer then stops sending.

    Example: VersionTaken(5, wants_delta=False, broadcast=BroadcastOrder("", 3, "gloo"))
    """

    policy_version: Version
    # nodes pull that have the version before
    wants_delta: bool
    broadcast: BroadcastOrder | None = None


@dataclass(frozen=True, slots=True)
class BroadcastStatus:
    """From the trainer: the members of a new group meet at `address`. From the trainer or a member:
    the broadcast of this version has failed for `reason`, in one line.

    Example: BroadcastStatus(5, "7c1f...", address="10.0.0.1:41873")
    """

    policy_version: Version
    # "" if none was opened
    group: Word
    address: Word = ""
    reason: Text = ""
