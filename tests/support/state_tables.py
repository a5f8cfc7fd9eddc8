"""What tests of a state machine of a daemon's role share: its table, and every way through it."""

from collections.abc import Callable, Hashable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import pytest

from lightrl.errors import InvariantViolation
from lightrl.state_machine import Edges, Event, State, next_state

Model = TypeVar("Model", bound=Hashable)
ROOT = Path(__file__).parents[2] / "lightrl"


def table(edges: Mapping[State, Mapping[Event, State]]) -> str:
    """What belongs into the README, made from the edges."""
    lines = ["| from | to | when |", "| --- | --- | --- |"]
    for before, events in edges.items():
        name = str(before)
        for after in type(before):
            if when := [event for event, to in events.items() if to is after]:
                lines.append(f"| {name} | {after} | {', '.join(when)} |")
                name = ""
    return "\n".join(lines)


def readme(folder: str) -> str:
    return (ROOT / folder / "README.md").read_text(encoding="utf-8")


def walk(
    edges: Edges[State, Event],
    start: State,
    events: type[StrEnum],
    model: Model,
    step: Callable[[Model, Event], Model | None],
) -> dict[State, Model]:
    """Every way that leads anywhere, in the machine and beside it in a model of what it stands for.

    `step` says what an event makes of the model, None if it cannot come. Fails unless the two agree
    on everything: which events can come where, and that a state stands for one thing. Returns that.
    """
    stands_for = {start: model}
    waiting, gone = [start], set[tuple[State, Event]]()
    while waiting:
        state = waiting.pop()
        for event in events:
            expected = step(stands_for[state], event)  # type: ignore[arg-type]
            if expected is None:
                with pytest.raises(InvariantViolation, match=f" {state}: {event}$"):
                    next_state(edges, state, event)  # type: ignore[arg-type]
                continue
            after = next_state(edges, state, event)  # type: ignore[arg-type]
            gone.add((state, event))  # type: ignore[arg-type]
            if after not in stands_for:
                stands_for[after] = expected
                waiting.append(after)
            assert stands_for[after] == expected, f"{state}, {event}: {after}"
    assert gone == {(state, event) for state, to in edges.items() for event in to}
    assert set(stands_for) == set(type(start)) == set(edges)
    assert len(set(stands_for.values())) == len(stands_for), "two states for one thing"
    return stands_for
