"""When devices that sample and train change sides: by both rules, on cases computed by hand."""

from dataclasses import replace

import pytest

from lightrl.core.nodes.speed import Speed
from lightrl.core.sharing.round_outlook import peak_context
from lightrl.core.sharing.sharing_rules import (
    NOTHING,
    Change,
    ForecastRule,
    StepTimes,
    View,
    WindowRule,
    half_of,
)
from lightrl.core.state import Node
from lightrl.messages.load import Load

SLOPE = 0.001  # seconds that each response adds to a step: 1,000 tokens a second and node
STEP = StepTimes(
    kind="plain",
    others=2.0,
    others_now=2,
    rollout_s=100.0,
    trainer_waited_s=12.0,
    others_waited_s=3.0,
)


def nodes(prefix: str, count: int, base: float = 0.0) -> list[Node]:
    return [
        Node(
            f"{prefix}{k}", 1, ("rollout",), 64, 0.0, 1, "h", part=k, speed=Speed(base, SLOPE, 999)
        )
        for k in range(count)
    ]


def view(shared: int = 4, others: int = 2, released: int = 0, **changes) -> View:
    """A fluid: 60,000 tokens are left, 60 of 100 of training; no response counts by itself."""
    made = View(
        kind="plain",
        opened_at=0.0,
        finished=0.1,
        sampling=nodes("s", shared),
        others=nodes("o", others),
        released=nodes("r", released),
        train_s=20.0,
        ready_s=15.0,
        switch_s=0.0,
        left=evenly(60_000.0),
    )
    return replace(made, **changes)


def evenly(total: float, num: int = 120, longest: float = 0.0) -> list[float]:
    """Engine steps of so many responses, all but the longest alike."""
    each = (total - longest) / (num - 1) if longest else total / num
    return [each] * (num - 1) + [longest or each]


def test_what_is_left_takes_more_nodes_less_time_but_not_the_longest_response():
    v = view(left=evenly(20_000.0, 39, 1000.0))
    both = nodes("n", 2, base=0.01)
    assert v.rest_s(both[:1]) == pytest.approx(10 + 20)
    assert v.rest_s(both) == pytest.approx(10 + 10)
    assert v.rest_s([]) == float("inf")
    assert replace(v, left=[]).rest_s(both) == 0.0


# Foreseen


def test_all_are_released_when_the_others_need_no_longer_than_the_trainer():
    rule = ForecastRule()
    whole = view(in_parts=False)
    early = rule.decide(whole, now=5.0)  # the others need 30 s, the trainer 20
    assert early == Change(look_at=5.0 + (30 - 20) * 10 / 30)
    late = rule.decide(replace(whole, left=evenly(40_000.0)), now=9.0)
    assert sorted(late.release) == ["s0", "s1", "s2", "s3"]


def test_half_is_released_once_while_the_others_do_not_suffice():
    v = view(switch_s=1.0)
    assert len(ForecastRule().decide(v, now=0.0).release) == 2
    assert ForecastRule().decide(replace(v, ready_s=1.0), now=0.0).release == ()
    tail = replace(v, others=[], left=evenly(1000.0, 12, 890.0), switch_s=0.0)
    assert len(ForecastRule().decide(tail, now=0.0).release) == 2
    again = view(shared=2, released=2, others=0, left=evenly(3000.0))
    assert ForecastRule().decide(again, now=0.0).release == ()


def test_a_release_must_save_more_than_a_switch():
    few = view(left=evenly(2000.0), train_s=2.0)
    assert ForecastRule().decide(few, now=0.0).release != ()
    assert ForecastRule().decide(replace(few, switch_s=3.0), now=0.0) == NOTHING
    for node in few.sampling:
        node.context = 300_000  # tokens to prefill
    assert ForecastRule().decide(few, now=0.0).release == ()


def test_caches_that_do_not_hold_the_rest_keep_the_nodes():
    v = view(left=evenly(40_000.0), opened_at=1.0, kv_tokens=1900.0, in_parts=False)
    for node in v.now_sampling():
        node.load = Load(kv_tokens=1000)
    assert ForecastRule().decide(v, now=500.0).release != ()
    full = replace(v, kv_tokens=1901.0)  # 95 % of two caches are 1,900 tokens
    assert ForecastRule().decide(full, now=500.0).release == ()
    as_published = WindowRule()
    as_published.learn(STEP)
    assert len(as_published.decide(full, now=500.0).release) == 4


def test_released_nodes_come_back_when_the_others_vanish():
    rule = ForecastRule()
    assert len(rule.decide(view(left=evenly(40_000.0)), now=0.0).release) == 4
    alone = view(shared=0, others=0, released=4, left=evenly(30_000.0), switch_s=1.0)
    assert sorted(rule.decide(alone, now=1.0).take_back) == ["r0", "r1", "r2", "r3"]
    one_left = view(
        shared=0, others=1, released=4, left=evenly(60_000.0), train_s=10.0, switch_s=1.0
    )
    assert rule.decide(one_left, now=1.0).take_back != ()
    nearly_done = replace(one_left, left=evenly(2000.0))
    assert rule.decide(nearly_done, now=1.0) == NOTHING  # does not pay


def test_nothing_is_foreseen_of_a_trainer_that_has_not_trained_and_little_without_work():
    assert ForecastRule().decide(view(train_s=None), now=0.0) == NOTHING
    assert ForecastRule().decide(view(train_s=0.0, ready_s=0.0), now=0.0).release == ()


# WindowRule


def test_half_is_released_once_while_20_to_50_percent_have_finished():
    v = view(others=0)
    assert [n.name for n in half_of(replace(v, finished=0.2))] == ["s0", "s1"]
    assert half_of(replace(v, finished=0.19)) == half_of(replace(v, finished=0.51)) == []
    assert half_of(view(others=0, shared=2, released=2, finished=0.3)) == []
    assert half_of(replace(v, finished=0.3, left=[1.0] * 129)) == []  # two nodes of 64 slots
    assert half_of(replace(v, finished=0.3, in_parts=False)) == []
    assert WindowRule().decide(replace(v, finished=0.3), now=0.0) == Change(release=("s0", "s1"))


def test_the_window_is_corrected_by_who_waited_longer():
    rule = WindowRule()
    v = view()
    assert rule.decide(v, now=1e6) == NOTHING  # nothing is known: all sample to the end
    rule.learn(STEP)
    assert rule.window_s("plain", 2) == pytest.approx(100 + (12 - 3) / 3)
    assert rule.decide(replace(v, opened_at=7.0), now=50.0) == Change(look_at=110.0)
    assert len(rule.decide(replace(v, opened_at=7.0), now=110.0).release) == 4
    rule.learn(replace(STEP, trainer_waited_s=0.0, others_waited_s=1e9))
    assert rule.window_s("plain", 2) == 0.0  # never negative


def test_the_most_context_at_once_is_not_that_of_all_ends():
    assert peak_context([]) == 0.0
    assert peak_context([(10.0, 5)]) == 15.0
    # 100 + 3 * 2 when the shortest ends; 60 + 2 * 10; 20 + 90
    assert peak_context([(90.0, 20), (2.0, 40), (10.0, 40)]) == 110.0
    assert peak_context([(1.0, 100), (10.0, 5)]) == 107.0


def test_nodes_that_still_load_when_a_round_opens_count_for_its_window():
    rule = WindowRule()
    rule.learn(STEP)
    opened = view(others=0, others_loading=2, opened_at=7.0)
    assert rule.decide(opened, now=7.0) == NOTHING
    assert rule.decide(view(opened_at=7.0), now=50.0) == Change(look_at=110.0)


def test_kinds_of_rounds_are_remembered_apart():
    rule = WindowRule()
    rule.learn(STEP)
    assert rule.window_s("long", 2) is None
    rule.learn(replace(STEP, kind="long", rollout_s=900.0))
    assert rule.window_s("long", 2) == pytest.approx(903)
    assert rule.window_s("plain", 2) == pytest.approx(103)


def test_the_window_stays_the_same_within_a_step():
    rule = WindowRule()
    rule.learn(STEP)
    rule.decide(view(), now=0.0)
    more = view(others=5)
    assert rule.decide(more, now=50.0) == Change(look_at=103.0)


def test_a_clock_that_jumps_is_forgotten_by_the_next_step():
    rule = WindowRule()
    rule.learn(STEP)
    back = rule.decide(view(opened_at=1e9), now=5.0)
    assert back == Change(look_at=108.0)  # as if the round began now
    rule.learn(replace(STEP, rollout_s=1e7, trainer_waited_s=1e7))
    assert (rule.window_s("plain", 2) or 0.0) > 1e6
    rule.decide(view(opened_at=2e9), now=2e9)
    rule.learn(STEP)
    assert rule.window_s("plain", 2) == pytest.approx(103)
