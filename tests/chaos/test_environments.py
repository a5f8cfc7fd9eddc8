"""Episodes, whose environments are killed and stopped with all else: the bits of an undisturbed
run."""

import pytest

from tests.chaos.conftest import ENGINE, LIMIT_S, STEPS, run_chaos

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(4 * LIMIT_S)]


def test_events_change_no_bit_of_episodes():
    many = ("--engine", ENGINE, "--steps", str(STEPS), "--events", "8", "--seed", "1,2")
    result = run_chaos("--environments", *many)
    for outcome in result["seeds"]:
        assert outcome["ok"], outcome.get("why", outcome)
    kinds = {event["event"].split()[1] for s in result["seeds"] for event in s["events"]}
    assert {"worker", "environment"} <= kinds
