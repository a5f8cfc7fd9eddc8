"""The states of a trainer, without ranks or sockets."""

from lightrl.trainer.state import EDGES, TrainerEvent, TrainerState
from tests.support.state_tables import readme, table, walk

E = TrainerEvent


def after(ranks: str, event: TrainerEvent) -> str | None:
    """What an event does to the ranks; None where it cannot happen."""
    match event:
        case E.RANKS_LOST:
            return "lost"
        case E.RANKS_STARTED if ranks in {"starting", "lost"}:
            return "up"
        case E.UPDATE_BEGAN if ranks == "up":
            return "updating"
        case E.UPDATE_ENDED if ranks == "updating":
            return "up"
        case _:
            return None


def test_every_transition_is_expected_and_no_other_exists():
    states = walk(EDGES, TrainerState.STARTING, TrainerEvent, "starting", after)
    assert set(states) == set(TrainerState)


def test_readme_shows_the_edges_of_the_code():
    assert table(EDGES) in readme("trainer")
