"""What a leading trainer node and those that follow it say to each other, in TrainerRelay.

Owns only the vocabulary. All of it is of one life of the ranks: whatever is of another one is
dropped. Must not import torch: the daemon imports this file.

    leader -> follower   StartRanks RankTold EndRanks
    follower -> leader   RankSaid RanksGone
"""

from dataclasses import dataclass
from typing import TypeAlias

from lightrl.trainer.protocol import StartRank
from lightrl.wire import Codec


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start these ranks, in place of any others. What is said of the follower's own machine in
    them, the follower fills in.

    `proof` is a file that the leader has made in `checkpoint.dir`, with the name of this life in
    it: a follower that cannot read it does not see that folder.
    """

    life: str
    starts: tuple[StartRank, ...]
    proof: str


@dataclass(frozen=True, slots=True)
class RankTold:
    """A RankCommand for this rank, encoded as its pipe wants it."""

    life: str
    rank: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class EndRanks:
    """This life is over: kill what is left of its ranks, or let them end if it `is_orderly`."""

    life: str
    is_orderly: bool = False


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A RankEvent of this rank, as it came through its pipe."""

    life: str
    rank: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class RanksGone:
    """A rank of the follower has died, or none can be started; `is_final`: they would fail in the
    same way again."""

    life: str
    reason: str
    is_final: bool = False


ToFollower: TypeAlias = StartRanks | RankTold | EndRanks
ToLeader: TypeAlias = RankSaid | RanksGone

TO_FOLLOWER: Codec[ToFollower] = Codec(ToFollower)
TO_LEADER: Codec[ToLeader] = Codec(ToLeader)
