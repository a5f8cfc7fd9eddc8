"""Seeds give the events that the other tests count on."""

import importlib
import random
from collections import Counter
from itertools import pairwise
from types import ModuleType

import pytest

from lightrl.messages.snapshot import NodeRow, Snapshot
from tests.chaos.conftest import SCRIPTS

STEPS, NODES, LEASE_S = 8, 2, 2.0


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("chaos_lib.plan")


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("chaos_lib.sharing_plan")


def test_a_seed_can_be_repeated(plan: ModuleType):
    assert plan.draw(7, 8, STEPS, NODES, LEASE_S) == plan.draw(7, 8, STEPS, NODES, LEASE_S)
    assert plan.draw(7, 8, STEPS, NODES, LEASE_S) != plan.draw(8, 8, STEPS, NODES, LEASE_S)


def test_five_seeds_have_all_kinds(plan: ModuleType):
    kinds = {e.kind for seed in range(1, 6) for e in plan.draw(seed, 8, STEPS, NODES, LEASE_S)}
    assert kinds == set(plan.KINDS)


def test_five_seeds_have_all_kinds_of_a_run_with_episodes(plan: ModuleType):
    kinds = plan.ENVIRONMENT_KINDS
    world = 8, STEPS, NODES, LEASE_S, 0, 1, kinds
    events = [e for seed in range(1, 6) for e in plan.draw(seed, *world)]
    assert {e.kind for e in events} == {*kinds}
    targets = {e.target for e in events if e.kind.split()[1:] in (["worker"], ["environment"])}
    assert targets == {"environment-0"}


@pytest.mark.parametrize("seed", range(300))
def test_somebody_is_left_to_go_on(plan: ModuleType, seed: int):
    """A node that is started again when it dies, and no step that is hit too often."""
    num_nodes = 1 + seed % 3
    own = {f"rollout-{k}" for k in range(num_nodes)}
    events = plan.draw(seed, random.Random(seed).randrange(17), STEPS, num_nodes, LEASE_S, 4)
    for event in events:
        if event.kind == "kill up":
            own = {f"rollout-{k}" for k in range(num_nodes)}
        elif event.kind in plan.LEAVING:
            own.discard(event.target)
        assert own
        if event.kind.endswith("engine"):
            assert event.target in own
    assert max(Counter(e.step for e in events).values(), default=0) <= plan.MAX_PER_STEP
    assert [e.step for e in events] == sorted(e.step for e in events)


# Devices that change sides


def row(name: str, state: str, state_s: float | None = None) -> NodeRow:
    return NodeRow(name, (), state, "h", 1, "", 0, 0, 0, 0.0, 0.0, 0.0, state_s=state_s)


def test_one_seed_with_an_event_for_each_has_all_pairs_of_kind_and_phase(sharing: ModuleType):
    num = len(sharing.CARDS)
    plan = sharing.draw_sharing(3, num, num + 1, NODES, LEASE_S)
    hits = [e for e in plan if e.kind != "join"]
    others = Counter(e.target for e in hits if e.target.startswith("late"))
    met = {("kill other" if e.target in others else e.kind, e.phase) for e in hits}
    assert met == set(sharing.CARDS)
    assert max(others.values()) == 1  # nobody starts it again
    assert max(Counter(e.step for e in hits).values()) == 1
    engines = [e.target for e in hits if e.kind.endswith("engine")]
    assert all(a != b for a, b in pairwise(engines))  # two in a row, and it samples no more


@pytest.mark.parametrize(
    ("states", "is_training", "seen"),
    [
        ({"rollout-0": "ready", "rollout-1": "ready"}, False, ""),
        ({"rollout-0": "releasing", "rollout-1": "released"}, True, "releasing"),
        ({"rollout-0": "released", "rollout-1": "updating"}, True, "waking"),
        ({"rollout-0": "released", "rollout-1": "ready"}, False, ""),
        ({"rollout-0": "released", "rollout-1": "released"}, False, "released"),
        ({"rollout-0": "released", "rollout-1": "released"}, True, "parking"),
    ],
)
def test_phases_of_a_change_are_seen_in_the_nodes(
    sharing: ModuleType, states: dict[str, str], is_training: bool, seen: str
):
    shared = tuple(row(name, state, 2.0) for name, state in states.items())
    nodes = (*shared, row("late-1", "updating"))
    snapshot = Snapshot("r", "r", "running", 3, 9, 3, 1.0, nodes)
    assert sharing.side(snapshot, "trainer-0", is_training) == seen
    if seen == "waking":
        assert sharing.side(snapshot, "rollout-1", is_training) == seen
        assert sharing.side(snapshot, "rollout-0", is_training) == ""
