"""The time of the slowest right answer to a prompt: kept for the whole run, whoever scores what."""

import pytest

from lightrl.core.commands import Record
from lightrl.core.events import ResponseScored
from lightrl.core.log_entries import SnapshotBegan
from lightrl.core.recovery import take_snapshot
from lightrl.core.rounds import group_lifecycle
from tests.core.conftest import Driver, held_out, of_kind


def score(d: Driver, name: str, slowest_s: float | None, reward: float = 1.0) -> list[object]:
    d.tokens(name, 9, finish="stop")
    attempt = d.core.table.responses[name].attempt
    return [*d.feed(ResponseScored(name, attempt, reward, "", slowest_s))]


def test_it_is_the_longest_of_all_answers_and_journaled(driver: Driver):
    driver.start("a", slots=4)
    commands = score(driver, "p0@0#0", 3.0)
    entries = [c.entry for c in of_kind(commands, Record)]  # type: ignore[arg-type]
    assert ResponseScored("p0@0#0", 1, 1.0, "", 3.0) in entries
    score(driver, "p0@0#1", 1.5)
    score(driver, "p1@0#0", None, 0.0)
    assert driver.core.lifecycle.slowest_s == {"p0": 3.0}


def test_a_resume_has_the_same_ones(driver: Driver):
    driver.start("a", slots=4)
    score(driver, "p0@0#0", 3.0)
    score(driver, "p1@0#0", 0.5)
    for _ in range(2):  # from the entries, then from a snapshot
        driver.restart()
        assert driver.core.lifecycle.slowest_s == {"p0": 3.0, "p1": 0.5}
    driver.join("t", "trainer", incarnation=2)
    driver.publish(0)
    driver.join("a", slots=4)
    driver.confirm("a", 0)
    driver.finish_round()
    driver.next_step()
    [began] = [e for e in take_snapshot(driver.core) if isinstance(e, SnapshotBegan)]
    assert began.slowest_s == {"p0": 3.0, "p1": 0.5}
    driver.restart()
    assert driver.core.lifecycle.slowest_s == {"p0": 3.0, "p1": 0.5}


def test_limits_of_a_deterministic_run_are_fixed():
    d = Driver(deterministic=True)
    d.start("a", slots=4)
    score(d, "p0@0#0", 3.0)
    assert d.core.lifecycle.slowest_s == {}


def test_prompts_to_evaluate_on_have_times_of_their_own():
    d = Driver(eval_sets=held_out(1))
    d.start("a", slots=4)
    [name] = d.running()
    score(d, name, 2.0)
    assert d.core.lifecycle.slowest_s == {"\0e/0": 2.0}


def test_there_is_a_bound_of_prompts(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_lifecycle, "MAX_SLOWEST", 1)
    driver.start("a", slots=4)
    score(driver, "p0@0#0", 3.0)
    score(driver, "p1@0#0", 5.0)
    score(driver, "p0@0#1", 4.0)
    assert driver.core.lifecycle.slowest_s == {"p0": 4.0}
