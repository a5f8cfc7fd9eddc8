"""Devices that sample and train in turn, and everybody who takes part in that is killed or stopped
in each phase of it: the bits of an undisturbed run in which nothing is shared."""

from typing import Any

import pytest

from tests.chaos.conftest import LIMIT_S, Chaos, run_chaos

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(3 * LIMIT_S)
def test_events_while_devices_change_sides_change_no_bit(chaos: Chaos, undisturbed: dict[str, Any]):
    """Ranks die parking and when engines wake, an engine asleep, all preemptible nodes at the
    release."""
    result = chaos("--shared", "--events", "4", "--seed", "0")
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
    assert result["reference"] == undisturbed
    assert not outcome["missed"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["emulated", "torch"])
def test_each_kind_of_event_in_each_phase_changes_no_bit(engine: str):
    result = run_chaos("--shared", "--engine", engine, "--steps", "28", "--events", "26")
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
