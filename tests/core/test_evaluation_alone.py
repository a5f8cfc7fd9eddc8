"""A run that only evaluates: it ends where it begins."""

from typing import Any

import pytest

from lightrl.core.commands import CloseRound, Finish
from lightrl.core.events import NodeLeft
from lightrl.core.state import RunState
from lightrl.messages.nodes import Drain
from tests.core.conftest import Driver, held_out, of_kind, sent


def begun(step: int, **changes: Any) -> Driver:
    """The trainer stands at `step`, and one node serves that version."""
    alone = {"first_step": step, "num_steps": step, "num_prompts": 0, "eval_sets": held_out(2)}
    driver = Driver(**alone | changes)
    driver.join("t", "trainer")
    driver.publish(step)
    driver.join("a")
    driver.confirm("a", step)
    return driver


@pytest.mark.parametrize("step", [0, 5])
def test_it_evaluates_once_and_trains_nothing(step: int):
    driver = begun(step)
    # so the noise of its responses is that of a run that evaluates at this step
    assert driver.running() == [f"e/0@eval{step}#0", f"e/1@eval{step}#0"]
    commands = driver.finish_round(reward=0.5)
    assert [c.round.kind for c in of_kind(commands, CloseRound)] == ["eval"]
    assert [node for node, _ in sent(commands, Drain)] == ["a", "t"]
    commands = [c for node in "at" for c in driver.feed(NodeLeft(node, "sent away", ok=True))]
    [end] = of_kind(commands, Finish)
    assert (end.state, driver.core.step) == (RunState.FINISHED, step)


def test_an_evaluation_without_any_score_has_failed():
    driver = begun(5, max_unscored_steps=5)
    commands = driver.finish_round(reward=None)  # type: ignore[arg-type]
    assert driver.core.shutdown.has_begun
    assert "evaluation at step 5: none of 2 responses has a score: crashed" in str(commands)


def test_what_publishes_another_step_is_not_what_is_to_be_evaluated():
    driver = Driver(first_step=5, num_steps=5, num_prompts=0, eval_sets=held_out(2))
    driver.join("t", "trainer")
    assert "is at step 4, the run at step 5" in str(driver.publish(4))
