"""Evaluations of several sets in one round: each sampled as it says, the longest first."""

from typing import Any

import pytest

from lightrl.core.commands import CloseRound
from lightrl.core.events import NodeLost
from lightrl.core.settings import EvalSet
from lightrl.errors import InvariantViolation
from lightrl.messages.nodes import Drain
from lightrl.messages.responses import Generate, Sampling
from tests.core.conftest import Driver, of_kind, sent

ONCE, WIDE = EvalSet("once", 2, 1, Sampling(0.0), 3), EvalSet("wide", 1, 3, Sampling(0.6, 0.95), 20)


def evaluating(*sets: EvalSet, **changes: Any) -> Driver:
    driver = Driver(eval_sets=sets or (ONCE, WIDE), **changes)
    driver.start("a", slots=changes.get("slots", 0))
    return driver


def test_all_sets_are_sampled_together_each_as_it_says():
    driver = Driver(eval_sets=(ONCE, WIDE), slots=9)
    orders = [order for _, order in sent(driver.start("a"), Generate)]
    asked = {r.response: (o.sampling, r.max_new_tokens) for o in orders for r in o.requests}
    assert asked == {
        "once/0@eval0#0": (Sampling(0.0), 3),
        "once/1@eval0#0": (Sampling(0.0), 3),
        **{f"wide/0@eval0#{k}": (Sampling(0.6, 0.95), 20) for k in range(3)},
    }


def test_what_goes_on_elsewhere_keeps_its_sampling_and_its_limit():
    driver = evaluating(slots=9)
    driver.tokens("wide/0@eval0#1", 4, 5, 6)
    driver.join("b")
    driver.confirm("b", 0)
    [[name, order], *others] = [
        (name, order)
        for name, order in sent(driver.feed(NodeLost("a", "gone")), Generate)
        if order.sampling == Sampling(0.6, 0.95)
    ]
    assert (name, others) == ("b", [])
    [moved] = [r for r in order.requests if r.prefix]
    assert (moved.response, moved.max_new_tokens) == ("wide/0@eval0#1", 17)


def test_a_node_that_exceeds_the_limit_of_a_set_is_not_trusted_any_more():
    driver = evaluating(slots=9)
    driver.tokens("wide/0@eval0#0", *[9] * 11)  # more than training allows, not than its set does
    assert sent(driver.tokens("once/0@eval0#0", 9, 9, 9), Drain) == []
    commands = driver.tokens("once/1@eval0#0", 9, 9, 9, 9)
    assert "more than 3 tokens" in str(commands)


def test_it_closes_when_every_response_of_every_set_is_scored():
    driver = evaluating(slots=9)
    names = [r for g in driver.round.groups.values() for r in (x.id for x in g.responses)]
    for name in names[:-1]:
        assert of_kind(driver.finish(name, None if name.startswith("o") else 1.0), CloseRound) == []
    [closed] = of_kind(driver.finish(names[-1]), CloseRound)
    sizes = {g.prompt.id: len(g.responses) for g in closed.round.groups.values()}
    assert sizes == {"once/0": 1, "once/1": 1, "wide/0": 3}


def test_before_anything_is_known_those_with_the_highest_limit_go_first():
    driver = Driver(eval_sets=(ONCE, WIDE), slots=1)
    [(_, order)] = sent(driver.start("a"), Generate)
    assert [r.response for r in order.requests] == ["wide/0@eval0#0"]


def test_from_the_second_on_the_longest_go_first_by_what_the_one_before_took():
    sets = (EvalSet("x", 3, 1, Sampling(0.0), 10), EvalSet("y", 1, 2, Sampling(1.0), 10))
    lengths = {"x/0": 2, "x/1": 9, "x/2": 5, "y/0": 7}
    driver = Driver(eval_sets=sets, eval_interval=1, slots=99, group_size=1, prompts_per_step=1)
    driver.start("a")

    def length(name: str) -> int:
        return lengths.get(name.partition("@")[0], 3)

    driver.play(length, rounds=2)  # an evaluation, and a step
    assert (driver.round.kind, driver.round.step) == ("eval", 1)
    order = [name.partition("@")[0] for name in driver.core.fleet.nodes["a"].running]
    assert order == ["x/1", "x/2", "x/0", "y/0", "y/0"]  # the set with the longest, first


def test_prompts_with_the_ids_of_trained_ones_leave_what_is_known_of_these_alone():
    driver = evaluating(EvalSet("p0", 1, 1, Sampling(0.0), 10), slots=9)
    driver.finish("p0/0@eval0#0")
    assert driver.round.kind == "plain"
    assert list(driver.core.predictor.memory().lengths) == ["\0p0/0"]
    assert driver.core.predictor.memory().counts == (0.0,) * len(
        driver.core.predictor.memory().counts
    )


def test_a_coordinator_that_is_killed_in_the_middle_goes_on_with_the_same_groups():
    driver = evaluating(slots=9)
    driver.tokens("wide/0@eval0#2", 4, 5, 6)
    driver.finish("once/1@eval0#0", 0.5)
    before = {
        r.id: (list(r.tokens), r.reward, r.seed) for r in driver.core.table.responses.values()
    }
    driver.restart()
    after = {r.id: (list(r.tokens), r.reward, r.seed) for r in driver.core.table.responses.values()}
    assert after == before
    groups = driver.round.groups.values()
    assert [(g.size, g.sampling, g.max_response_tokens) for g in groups] == [
        *([(1, Sampling(0.0), 3)] * 2),
        (3, Sampling(0.6, 0.95), 20),
    ]


def test_a_prompt_of_no_set_is_no_prompt_to_evaluate_on():
    driver = Driver(eval_sets=(ONCE,))
    assert driver.core.settings.eval_set("once/1/2") is ONCE
    with pytest.raises(InvariantViolation, match=r"^other/1: is of no set to evaluate on$"):
        driver.core.settings.eval_set("other/1")
