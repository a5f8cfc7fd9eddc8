"""A run whose nodes pull and relay, on lines of their own: who does is killed, stopped, cut off."""

import importlib
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.conftest import LIMIT_S, SCRIPTS, run_chaos
from tests.support.lines import why_not

SHORT = ("--weights", "--engine", "emulated", "--steps", "3", "--events", "2")
LONG = ("--weights", "--engine", "emulated", "--steps", "10", "--events", "8")
SEED = "10"  # a rank stands still while it publishes, a node that relays is killed
# The same versions and rewards; only nothing takes any time.
AT_ONCE = "rollout.engine_args={t0_ms=0.0,mean_length=25.0,version_mb=17.0}"

needs_lines = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("way", ["pull", "delta", "broadcast"])
def test_eighteen_seeds_have_all_kinds_in_all_their_phases(
    way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(SCRIPTS)
    plan = importlib.import_module("chaos_lib.weights_plan")
    events = [e for seed in range(18) for e in plan.draw_weights(seed, 8, 10, 2.0, way=way)]
    drawn = Counter((e.kind, e.phase) for e in events)
    kinds = plan.PHASES[way]
    assert set(drawn) == {(kind, phase) for kind, phases in kinds.items() for phase in phases}


def test_a_group_that_is_to_form_is_ended_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    plan = importlib.import_module("chaos_lib.weights_plan")
    events = [e for seed in range(6) for e in plan.draw_weights(seed, 8, 10, 2.0, way="broadcast")]
    forming = [k for k, e in enumerate(events) if e.phase == "forming"]
    assert forming
    for before, event in ((events[k - 1], events[k]) for k in forming):
        assert (before.kind, before.step) == ("kill rollout", event.step)
        assert before.target != event.target


def test_a_phase_counts_as_tried_if_one_of_its_events_came(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    plan = importlib.import_module("chaos_lib.weights_plan")
    events = plan.draw_weights(2, 8, 14, 2.0, way="broadcast")
    forming = [e for e in events if e.phase == "forming"]
    assert len(forming) > 1
    assert plan.unhit_phases(events, forming[1:]) == []
    assert plan.unhit_phases(events, forming) == ["forming"]


@pytest.mark.e2e
@needs_lines
@pytest.mark.timeout(2 * LIMIT_S)
def test_events_in_phases_of_the_weights_change_no_bit_and_hold_up_nobody(tmp_path: Path):
    compared = ("--reference", str(tmp_path / "reference.json"))
    run_chaos(*SHORT, *compared, "--events", "0", AT_ONCE)
    result = run_chaos(*SHORT, *compared, "--seed", SEED)
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
    assert outcome["missed"] == []


@needs_lines
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_more_events_in_phases_of_the_weights_change_no_bit():
    result = run_chaos(*LONG, "--seed", "1,2,3,4,5,6")
    assert all(outcome["ok"] for outcome in result["seeds"]), result
