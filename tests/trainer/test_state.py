"""What a trainer says and takes, whatever its ranks do and whether the coordinator listens: every
way through its states, without ranks or sockets."""

from dataclasses import dataclass, replace
from typing import Literal

from lightrl.trainer.state import EDGES, SILENT, UNHEARD, TrainerEvent, TrainerState
from tests.support.state_tables import readme, table, walk

E = TrainerEvent


@dataclass(frozen=True)
class Situation:
    """What each event means, one thing at a time."""

    ranks: Literal["starting", "up", "updating", "lost"] = "starting"
    is_silent: bool = False
    begins_anew: bool = False

    def after(self, event: TrainerEvent) -> "Situation | None":
        are_up = self.ranks in {"up", "updating"}
        match event:
            case E.RANKS_LOST:
                return Situation("lost", is_silent=True)
            case E.PAUSED:
                return replace(self, is_silent=True, begins_anew=False)
            case E.WELCOMED if self.ranks == "lost":
                return self
            case E.WELCOMED:
                return replace(self, is_silent=self.ranks == "updating", begins_anew=are_up)
            case E.RANKS_STARTED if not are_up:
                return replace(self, ranks="up")
            case E.BEGAN_ANEW if self.ranks == "up" and self.begins_anew:
                return replace(self, begins_anew=False)
            case E.UPDATE_BEGAN if self.ranks == "up" and not self.begins_anew:
                return replace(self, ranks="updating")
            case E.UPDATE_ENDED if self.ranks == "updating":
                is_silent = self.is_silent and not self.begins_anew
                return Situation("up", is_silent)
            case _:
                return None


def test_every_way_is_as_it_should_be_and_no_other_can_be_gone():
    states = walk(EDGES, TrainerState.STARTING, TrainerEvent, Situation(), Situation.after)
    assert {s for s, situation in states.items() if situation.is_silent} == SILENT
    # who is welcomed takes shards, though it may have to update before it can say where it is
    takes = {s for s, sit in states.items() if not sit.is_silent or sit.begins_anew}
    assert set(TrainerState) - takes == UNHEARD


def test_readme_shows_the_edges_of_the_code():
    assert table(EDGES) in readme("trainer")
