"""Messages between the leading trainer node and the nodes that follow it, inside TrainerRelay.

Each belongs to one life of the ranks, the time from one start of all ranks to their end: messages
of another life are dropped. Must not import torch: the daemon imports this file.

    leader -> follower   StartRanks RankFrame EndRanks
    follower -> leader   RankFrame RanksGone
"""

from dataclasses import dataclass
from typing import TypeAlias

from lightrl.trainer.protocol import StartRank
from lightrl.wire import Codec


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start these ranks in place of any others. The follower fills in its own addresses and paths.

    `proof` is a file in `checkpoint.dir` that holds the name of this life: a follower that cannot
    read it does not see that folder.
    """

    life: str
    starts: tuple[StartRank, ...]
    proof: str


@dataclass(frozen=True, slots=True)
class RankFrame:
    """A RankCommand or RankEvent of this rank, encoded for its pipe."""

    life: str
    rank: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class EndRanks:
    """Kill the ranks of this life, or let them end if it `is_orderly`."""

    life: str
    is_orderly: bool = False


@dataclass(frozen=True, slots=True)
class RanksGone:
    """A rank has died, or none can be started; `is_final`: a restart would fail in the same way."""

    life: str
    reason: str
    is_final: bool = False


ToFollower: TypeAlias = StartRanks | RankFrame | EndRanks
ToLeader: TypeAlias = RankFrame | RanksGone

TO_FOLLOWER: Codec[ToFollower] = Codec(ToFollower)
TO_LEADER: Codec[ToLeader] = Codec(ToLeader)
