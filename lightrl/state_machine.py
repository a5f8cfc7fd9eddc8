"""State machines as tables: which events can come in a state, and which state follows.

Owns no state. Pure; the tables are in `state.py` of the folders of the roles. The entities of the
core, which choose their next state themselves, have their own in `core/state.py`.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from lightrl.errors import InvariantViolation

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Edges: TypeAlias = Mapping[State, Mapping[Event, State]]


def frozen(edges: dict[State, dict[Event, State]]) -> Edges[State, Event]:
    return MappingProxyType({state: MappingProxyType(to) for state, to in edges.items()})


def next_state(edges: Edges[State, Event], state: State, event: Event) -> State:
    """Raises InvariantViolation, one line, if the event cannot come in this state."""
    try:
        return edges[state][event]
    except KeyError:
        raise InvariantViolation(f"{type(state).__name__} {state}: {event}") from None
