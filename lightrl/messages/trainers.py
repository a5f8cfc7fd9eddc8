"""What is said so that several nodes train as one: who they are, and what their ranks are told.

Under the rules of message.py. A run with one trainer node says none of it.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

from lightrl.messages.fields import MAX_TRAINERS, Count, Name, Relayed, Word

Follower: TypeAlias = tuple[Name, Count]


@dataclass(frozen=True, slots=True)
class TrainerSet:
    """To each trainer node: who leads now, and who follows, once all are there; said again when
    that changes.

    The number beside a follower is another one after each of its hellos: messages may have been
    lost before it, and its ranks with them. Example: TrainerSet("trainer-0", (("trainer-1", 2),))
    """

    # "" = nobody
    leader: Word
    # in the order of their ranks; () = some are missing
    followers: Annotated[tuple[Follower, ...], Meta(max_length=MAX_TRAINERS)] = ()


@dataclass(frozen=True, slots=True)
class TrainerRelay:
    """From one trainer node to another, one of whom leads, by way of the coordinator, which does
    not look into it; trainer/nodes/protocol.py says what is in there.

    Example: TrainerRelay("trainer-1", <a frame>)
    """

    # to the head: for whom; from the head: from whom
    node: Name
    frame: Relayed
