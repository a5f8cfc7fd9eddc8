"""Messages by which several nodes train as one: their names and ranks, and what these exchange.

Under the rules of message.py. A run with one trainer node sends none of them.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

from lightrl.messages.fields import MAX_TRAINERS, Count, Name, Relayed, Word

Follower: TypeAlias = tuple[Name, Count]


@dataclass(frozen=True, slots=True)
class TrainerSet:
    """To each trainer node: the leader, and the followers once all are there; sent again when that
    changes.

    The number beside a follower is another one after each of its hellos: messages may have been
    lost before it, and its ranks with them. Example: TrainerSet("trainer-0", (("trainer-1", 2),))
    """

    # "" = none
    leader: Word
    # in the order of their ranks; () = some are missing
    followers: Annotated[tuple[Follower, ...], Meta(max_length=MAX_TRAINERS)] = ()


@dataclass(frozen=True, slots=True)
class TrainerRelay:
    """A frame from one trainer node to another, one of them the leader, relayed by the coordinator
    without decoding it; trainer/nodes/followers.py defines its content.

    Example: TrainerRelay("trainer-1", <a frame>)
    """

    # to the head: the receiver; from the head: the sender
    node: Name
    frame: Relayed
