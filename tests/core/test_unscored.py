"""A run whose rewards say nothing ends, and says why."""

from collections.abc import Iterator

import pytest

from lightrl.core.commands import CloseStep, Finish, Report
from lightrl.core.events import NodeLeft
from lightrl.core.state import RunState
from tests.core.conftest import Driver, held_out, of_kind

WHY = "KeyError: 'solution'"


def started(**changes) -> Driver:
    driver = Driver(
        **{
            "num_steps": 20,
            "prompts_per_step": 2,
            "group_size": 2,
            "skips_unscored": True,
            "max_unscored_steps": 5,
            **changes,
        }
    )
    driver.start("a")
    return driver


def play(driver: Driver, reward: float | None) -> Iterator[str]:
    """One round, every response of which gets this; what was said of it."""
    for name in driver.running():
        commands = driver.tokens(name, 9, finish="stop") + driver.score(name, reward, WHY)
        yield from (c.text for c in of_kind(commands, Report) if WHY in c.text)


def next_step(driver: Driver) -> None:
    assert of_kind(driver.next_step(), CloseStep)


def test_a_run_in_which_nothing_is_ever_scored_ends_with_its_first_step():
    driver = started()
    first, reason = play(driver, None)
    assert first == f"no reward for p0@0#0: {WHY}"
    assert reason == f"step 1: none of 4 responses has a score: {WHY}"
    assert driver.core.state is RunState.FINISHING
    driver.feed(NodeLeft("a", "drained", True))
    [finish] = of_kind(driver.feed(NodeLeft("t", "drained", True)), Finish)
    assert (finish.state, finish.reason) == (RunState.FAILED, reason)


def test_rewards_that_stop_working_end_the_run_after_five_steps_in_a_row():
    driver = started()
    for rewards in (1.0, *4 * [None], 1.0, *4 * [None]):
        told = list(play(driver, rewards))
        assert len(told) == (0 if rewards else 2)  # the first failure, and the step as a whole
        assert driver.core.state is RunState.RUNNING
        next_step(driver)
    _, reason = play(driver, None)
    assert reason.endswith(
        f"step 11: none of 4 responses has a score: {WHY} (5 such steps in a row)"
    )
    assert driver.core.state is RunState.FINISHING


def test_one_score_is_enough_for_a_step():
    driver = started(num_steps=3)
    for _ in range(2):
        *others, last = driver.running()
        for name in others:
            driver.tokens(name, 9, finish="stop")
            driver.score(name, None, WHY)
        driver.finish(last)
        assert driver.core.state is RunState.RUNNING
        next_step(driver)


def test_an_evaluation_without_any_score_ends_a_run_that_has_seen_none():
    driver = started(eval_sets=held_out(2))
    *_, reason = play(driver, None)
    assert reason == f"evaluation at step 0: none of 2 responses has a score: {WHY}"
    assert driver.core.state is RunState.FINISHING


@pytest.mark.parametrize("changes", [{"reward_on_failure": 0.0}, {"skips_unscored": False}])
def test_what_a_failure_costs_does_not_matter(changes):
    driver = started(**changes)
    list(play(driver, None))
    while driver.running():  # of a group that was dropped before all had run
        list(play(driver, None))
    assert driver.core.state is RunState.FINISHING


def test_a_run_that_is_resumed_gets_another_chance():
    driver = started()
    list(play(driver, None))
    driver.restart()
    driver.join("t", "trainer")
    driver.publish(0)
    assert driver.core.state is not RunState.FINISHING
