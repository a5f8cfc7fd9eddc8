"""A table of states cannot be changed, and what it does not have is refused in one line."""

from enum import StrEnum

import pytest

from lightrl.errors import InvariantViolation
from lightrl.state_machine import frozen, next_state


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"


class Move(StrEnum):
    PUSH = "push"
    PULL = "pull"


EDGES = frozen({Door.OPEN: {Move.PUSH: Door.SHUT}, Door.SHUT: {Move.PULL: Door.OPEN}})


def test_an_event_leads_to_its_state_and_any_other_is_refused():
    assert next_state(EDGES, Door.OPEN, Move.PUSH) is Door.SHUT
    with pytest.raises(InvariantViolation, match=r"^Door open: pull$"):
        next_state(EDGES, Door.OPEN, Move.PULL)


def test_a_table_cannot_be_changed():
    with pytest.raises(TypeError):
        EDGES[Door.OPEN] = {}  # type: ignore[index]
    with pytest.raises(TypeError):
        EDGES[Door.OPEN][Move.PULL] = Door.OPEN  # type: ignore[index]
