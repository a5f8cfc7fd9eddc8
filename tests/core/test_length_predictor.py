"""What is expected of a response's length, and what that does."""

import pytest

from lightrl.core.responses.length_predictor import LengthPredictor
from lightrl.core.settings import Tail
from lightrl.messages.responses import Generate
from tests.core.conftest import Driver, sent


def played(lengths: dict[str, int], **changes: object) -> Driver:
    """After one epoch in which every response of a prompt had the given length."""
    d = Driver(**{"num_prompts": len(lengths), "num_steps": 9, "slots": 99} | changes)
    d.start("a")
    d.play(
        lambda name: lengths[name.split("@")[0]],
        rounds=len(lengths) // d.core.settings.prompts_per_step,
    )
    return d


def test_nothing_is_known_of_a_prompt_in_its_first_epoch():
    d = Driver(prompts_per_step=2)
    d.start("a")
    assert [g.foreseen_tokens for g in d.round.groups.values()] == [None, None]


def test_prompt_is_expected_to_take_as_long_as_in_its_last_epoch():
    d = played({"p0": 3, "p1": 8})
    assert [g.foreseen_tokens for g in d.round.groups.values()] == [3, 8]
    assert d.core.predictor.expect(d.held("p1@1#0")) == 8


def test_work_is_sent_longest_first():
    d = played({"p0": 3, "p1": 8, "p2": 5}, prompts_per_step=3, group_size=1)
    last = sent(d.join("b") + d.confirm("b", 1), Generate)
    assert last == []
    order = list(d.core.fleet.nodes["a"].running)
    assert order == ["p1@1#0", "p2@1#0", "p0@1#0"]


def test_work_is_sent_in_order_without_foresight():
    d = played({"p0": 3, "p1": 8, "p2": 5}, prompts_per_step=3, group_size=1, foresight=False)
    assert list(d.core.fleet.nodes["a"].running) == ["p0@1#0", "p1@1#0", "p2@1#0"]


def test_response_that_is_longer_than_all_of_its_prompt_is_expected_to_go_on():
    d = played({"p0": 3, "p1": 8})
    d.tokens("p0@1#0", *[9] * 5)
    assert d.core.predictor.expect(d.held("p0@1#0")) > 5


def test_finished_siblings_tell_of_those_that_still_run():
    d = Driver()
    d.start("a")
    before = d.core.predictor.expect(d.held("p0@0#1"))
    d.tokens("p0@0#0", *[9] * 7, finish="stop")
    d.score("p0@0#0")
    assert d.core.predictor.expect(d.held("p0@0#1")) == 7 != before


def test_prompt_without_a_past_is_expected_to_be_like_all_others():
    d = played({"p0": 8, "p1": 8, "p2": 8, "p3": 8})
    assert d.core.predictor.expect(d.held("p0@1#0")) == 8
    fresh = Driver(num_prompts=99, num_steps=9, slots=99)
    fresh.start("a")
    fresh.play(lambda _: 8)
    assert fresh.core.predictor.expect(fresh.held("p2@0#0")) == pytest.approx(8, rel=0.2)


def test_nothing_is_expected_to_be_longer_than_allowed():
    d = Driver()
    d.start("a")
    d.tokens("p0@0#0", *[9] * 9)
    assert d.core.predictor.expect(d.held("p0@0#0")) <= 10
    assert LengthPredictor(10).finished("p0") is None


def test_prompt_put_off_is_remembered_by_what_it_was_trained_with():
    d = Driver(tail=Tail(2.0), num_steps=9, slots=99)
    d.start("a")
    lengths = {"p0": 1, "p1": 2, "p2": 8, "p3": 9}
    d.play(lambda name: lengths[name[:2]])
    assert [d.core.predictor.finished(p) for p in lengths] == [1, 2, None, None]
    d.play(lambda name: lengths[name[:2]])
    assert [d.core.predictor.finished(p) for p in lengths] == [1, 2, 8, 9]
