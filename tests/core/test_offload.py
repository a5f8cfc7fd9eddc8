"""When devices that sample and train change sides: by both rules, on cases computed by hand."""

from dataclasses import replace

import pytest

from lightrl.core.nodes.speed import Speed
from lightrl.core.responses.placement import Outlook
from lightrl.core.sharing.round_outlook import in_waves, peak_context
from lightrl.core.sharing.sharing_rules import (
    NOTHING,
    Change,
    ForecastRule,
    ScaleDown,
    StepTimes,
    View,
    Window,
    best_window_s,
)
from lightrl.core.state import Node

SLOPE = 0.001  # seconds that each response adds to a step: 1,000 tokens a second and node
STEP = StepTimes(
    kind="plain",
    others=2.0,
    others_now=2,
    rollout_s=100.0,
    work_s=500.0,
    train_s=60.0,
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
        sampling=[Outlook(n, [0.0] * k) for k, n in enumerate(nodes("s", shared))],
        others=[Outlook(n, []) for n in nodes("o", others)],
        released=nodes("r", released),
        train_s=20.0,
        ready_s=0.0,
        arrivals=tuple((k / 100, k / 100) for k in range(1, 101)),
        switch_s=0.0,
        left=evenly(60_000.0),
    )
    return replace(made, **changes)


def evenly(total: float, num: int = 120, longest: float = 0.0) -> list[float]:
    """Engine steps of so many responses, all but the longest alike."""
    each = (total - longest) / (num - 1) if longest else total / num
    return [each] * (num - 1) + [longest or each]


# The equation


def test_the_best_window_lets_nobody_wait():
    window = best_window_s(work_s=500.0, train_s=60.0, shared=4, others=2)
    assert window == pytest.approx((500 - 2 * 60) / 6)
    assert 2 * (window + 60) + 4 * window == pytest.approx(500)
    assert best_window_s(500.0, 60.0, 4, 0) == 125.0  # all of the rollout
    assert best_window_s(500.0, 0.0, 4, 1) == 100.0
    assert best_window_s(500.0, 60.0, 4, 9) == 0.0


def test_what_is_left_takes_more_nodes_less_time_but_not_the_longest_response():
    v = view(left=evenly(20_000.0, 39, 1000.0))
    both = nodes("n", 2, base=0.01)
    assert v.rest_s(both[:1]) == pytest.approx(10 + 20)
    assert v.rest_s(both) == pytest.approx(10 + 10)
    assert v.rest_s([]) == float("inf")
    assert replace(v, left=[]).rest_s(both) == 0.0


def test_what_is_left_is_foreseen_with_the_curve_of_each_node():
    [node] = nodes("n", 1)
    for _ in range(8):
        for batch in range(64, 0, -1):
            node.speed.observe(batch, 0.04 if batch > 40 else 0.01)
    assert 32 <= node.capacity <= 40  # of more than these, the rest does better to wait
    alone = view(left=[1000.0] * 20).rest_s([node])
    assert alone == pytest.approx(10.0, rel=0.1)
    turns = view(left=[1000.0] * 3 * node.capacity).rest_s([node])
    assert turns == pytest.approx(3 * 10.0, rel=0.1)


# Foreseen


def test_all_go_when_the_others_need_no_longer_than_the_trainer():
    rule = ForecastRule()
    early = rule.decide(view(), now=5.0)  # the others need 30 s, the trainer 20: T* in 5 s
    assert early.release == ()
    assert early.look_at == pytest.approx(5.0 + (60 - 2 * 20) / 6, rel=0.05)
    late = rule.decide(view(left=evenly(40_000.0)), now=9.0)
    assert sorted(late.release) == ["s0", "s1", "s2", "s3"]


def test_a_switch_that_costs_more_than_it_brings_is_left_out():
    v = view(left=evenly(10_000.0), train_s=2.0)  # now 1.7 s + 2, else 5 s
    assert ForecastRule().decide(v, now=0.0).release == ()
    few = view(left=evenly(2000.0), train_s=2.0)
    assert ForecastRule().decide(few, now=0.0).release != ()
    assert ForecastRule().decide(replace(few, switch_s=3.0), now=0.0) == NOTHING


def test_groups_that_come_late_are_waited_for():
    early, late = view(left=evenly(40_000.0)), view(left=evenly(40_000.0), arrivals=[(1.0, 1.0)])
    assert ForecastRule().decide(early, now=0.0).release != ()
    assert ForecastRule().decide(late, now=0.0).release == ()


def test_groups_of_a_round_in_waves_come_evenly_and_then_as_fewer_and_fewer_run():
    assert in_waves(1.0) == [(k / 16, k / 16) for k in range(1, 17)]
    assert in_waves(0.5)[:8] == in_waves(1.0)[:8]
    assert in_waves(0.5)[11] == (0.75, 0.875)
    assert in_waves(0.0)[7] == (0.5, 0.75)
    assert in_waves(0.0)[-1] == (1.0, 1.0)


def test_half_goes_if_the_trainer_has_work_in_hand_and_the_tail_needs_no_more():
    tail = {"left": evenly(10_000.0, 8, 5000.0), "train_s": 60.0}
    slow = nodes("s", 4, base=0.01)
    sampling = [Outlook(n, [0.0] * k) for k, n in enumerate(slow)]
    v = view(others=1, sampling=sampling, **tail)
    assert ForecastRule().decide(replace(v, arrivals=[(1.0, 1.0)], ready_s=0.0), 0.0).release == ()
    v.others[0].node.speed = Speed(0.05, SLOPE, 999)  # that one alone would need 260 s
    ready = replace(v, ready_s=50.0, arrivals=[(1.0, 1.0)])
    assert ForecastRule().decide(ready, 0.0).release == ("s0", "s1")


def test_caches_that_do_not_hold_the_rest_keep_the_nodes():
    rule = ForecastRule()
    v = view(left=evenly(40_000.0), opened_at=1.0)
    rule.learn(STEP)
    room = replace(v, kv_tokens=1900.0, caches={n.name: 1000 for n in v.now_sampling()})
    assert rule.decide(room, now=500.0).release != ()
    full = replace(room, kv_tokens=1901.0)  # 95 % of two caches are 1,900 tokens
    assert len(rule.decide(full, now=500.0).release) < 4
    as_published = Window()
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
    both_left = view(
        shared=0, others=2, released=4, left=evenly(60_000.0), train_s=10.0, switch_s=1.0
    )
    assert rule.decide(both_left, now=1.0).take_back == ()  # nobody is gone


def test_nothing_is_foreseen_of_a_trainer_that_has_not_trained_and_little_without_work():
    assert ForecastRule().decide(view(train_s=None), now=0.0) == NOTHING
    assert ForecastRule().decide(view(train_s=0.0), now=0.0) == NOTHING


# Without others


@pytest.mark.parametrize("rule", [ForecastRule(), Window()], ids=["foreseen", "window"])
def test_without_others_half_goes_in_the_tail(rule):
    rule.learn(STEP)
    v = view(others=0, left=evenly(1000.0, 12, 890.0), ready_s=5.0)
    assert rule.decide(v, now=1e6) == NOTHING  # 10 % have finished
    half = rule.decide(replace(v, finished=0.25), now=2.0)
    assert half == Change(release=("s0", "s1"))


def test_half_stays_where_the_rest_would_take_longer_than_what_is_trained_beside_it():
    far_from_the_tail = view(others=0, finished=0.25)
    assert ScaleDown(again=True).decide(far_from_the_tail).release != ()
    assert ForecastRule().decide(far_from_the_tail, now=0.0) == NOTHING
    unknown = replace(far_from_the_tail, train_s=None)
    assert ForecastRule().decide(unknown, now=0.0).release != ()


def test_halves_go_again_only_while_few_responses_run():
    rest = view(others=0, shared=2, released=2, opened_at=1.0, finished=0.6)
    assert ScaleDown(again=True).decide(replace(rest, left=[1.0] * 12)) == Change(release=("s0",))
    assert ScaleDown(again=True).decide(replace(rest, left=[1.0] * 13)) == NOTHING  # of 64 slots
    assert ScaleDown().decide(replace(rest, left=[1.0] * 12)) == NOTHING
    assert ScaleDown().decide(view(others=0, finished=0.54)).release != ()  # a late look at 50 %
    assert ScaleDown().decide(view(others=0, finished=0.56)) == NOTHING


# Window


def test_the_window_is_corrected_by_who_waited_longer():
    rule = Window(first_guess=False)
    v = view()
    assert rule.decide(v, now=1e6) == NOTHING  # nothing is known: all sample to the end
    rule.learn(STEP)
    assert rule.window_s("plain", shared=4, others=2) == pytest.approx(100 + (12 - 3) / 3)
    assert rule.decide(replace(v, opened_at=7.0), now=50.0) == Change(look_at=110.0)
    assert len(rule.decide(replace(v, opened_at=7.0), now=110.0).release) == 4
    rule.learn(replace(STEP, trainer_waited_s=0.0, others_waited_s=1e9))
    assert rule.window_s("plain", 4, 2) == 0.0  # never negative


def test_memory_answers_a_number_of_nodes_it_knows_and_the_equation_any_other():
    rule, published = Window(), Window(first_guess=False)
    guess = (500 - 2 * 60) / 6
    for each, begins, corrected in ((rule, guess, guess + 3), (published, 103.0, 103.0)):
        each.learn(STEP)
        assert each.window_s("plain", 4, 2) == pytest.approx(begins)
        each.decide(view(), now=0.0)
        each.learn(replace(STEP, others=1.96))  # they had loaded the weights
        each.learn(replace(STEP, others=2.5, others_now=3))  # n changed in this step
        assert each.window_s("plain", 4, 2) == pytest.approx(corrected)
    assert rule.window_s("plain", 4, 3) == pytest.approx((500 - 3 * 60) / 7)
    assert published.window_s("plain", 4, 3) == pytest.approx(103)  # T_seed stays what it was
    # Nobody is there yet: T_seed.
    assert rule.window_s("plain", 0, 0) == rule.window_s("plain", 4, 2)


def test_memory_can_be_left_out():
    rule = Window(first_guess=False, remembers=False)
    rule.learn(STEP)
    rule.learn(replace(STEP, others=3.0, others_now=3, trainer_waited_s=STEP.trainer_waited_s + 30))
    remembering = Window(first_guess=False)
    remembering.learn(STEP)
    known = remembering.window_s("plain", 4, 2)
    assert rule.window_s("plain", 4, 2) == rule.window_s("plain", 4, 3) != known


def test_the_most_context_at_once_is_not_that_of_all_ends():
    assert peak_context([]) == 0.0
    assert peak_context([(10.0, 5)]) == 15.0
    # 100 + 3 * 2 when the shortest ends; 60 + 2 * 10; 20 + 90
    assert peak_context([(90.0, 20), (2.0, 40), (10.0, 40)]) == 110.0
    assert peak_context([(1.0, 100), (10.0, 5)]) == 107.0


def test_nodes_that_still_load_when_a_round_opens_count_for_its_window():
    rule = Window(first_guess=False)
    rule.learn(STEP)
    opened = view(others=0, others_loading=2, opened_at=7.0)
    assert rule.decide(opened, now=7.0) == NOTHING
    assert rule.decide(view(opened_at=7.0), now=50.0) == Change(look_at=110.0)


def test_kinds_of_rounds_are_remembered_apart():
    rule = Window(first_guess=False)
    rule.learn(STEP)
    assert rule.window_s("long", 4, 2) is None
    rule.learn(replace(STEP, kind="long", work_s=5000.0, rollout_s=900.0))
    assert rule.window_s("long", 4, 2) == pytest.approx(903)
    assert rule.window_s("plain", 4, 2) == pytest.approx(103)


def test_the_window_stays_the_same_within_a_step_and_ends_when_nobody_samples():
    rule = Window(first_guess=False)
    rule.learn(STEP)
    rule.decide(view(), now=0.0)
    more = view(others=5)
    assert rule.decide(more, now=50.0) == Change(look_at=103.0)
    alone = view(shared=0, others=0, released=4)
    assert rule.decide(alone, now=120.0) == Change(take_back=("r0", "r1", "r2", "r3"))


def test_a_clock_that_jumps_is_forgotten_by_the_next_step():
    rule = Window(first_guess=False)
    rule.learn(STEP)
    back = rule.decide(view(opened_at=1e9), now=5.0)
    assert back == Change(look_at=108.0)  # as if the round began now
    rule.learn(replace(STEP, rollout_s=1e7, trainer_waited_s=1e7))
    assert (rule.window_s("plain", 4, 2) or 0.0) > 1e6
    rule.decide(view(opened_at=2e9), now=2e9)
    rule.learn(STEP)
    assert rule.window_s("plain", 4, 2) == pytest.approx(103)


def test_a_step_without_training_is_all_window():
    rule = Window()
    rule.learn(replace(STEP, train_s=0.0))
    assert rule.window_s("plain", 4, 1) == 100.0
