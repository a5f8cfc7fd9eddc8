"""Seeds give the events that the other tests count on."""

import importlib
import random
from collections import Counter
from types import ModuleType

import pytest

from tests.chaos.conftest import SCRIPTS

STEPS, NODES, LEASE_S = 8, 2, 2.0


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("chaos_lib.plan")


def test_a_seed_can_be_repeated(plan: ModuleType):
    assert plan.draw(7, 8, STEPS, NODES, LEASE_S) == plan.draw(7, 8, STEPS, NODES, LEASE_S)
    assert plan.draw(7, 8, STEPS, NODES, LEASE_S) != plan.draw(8, 8, STEPS, NODES, LEASE_S)


def test_five_seeds_have_all_kinds(plan: ModuleType):
    kinds = {e.kind for seed in range(1, 6) for e in plan.draw(seed, 8, STEPS, NODES, LEASE_S)}
    assert kinds == set(plan.KINDS)


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
