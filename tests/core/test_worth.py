"""What a step takes and costs with so many nodes, against numbers computed by hand, and how many
are worth having."""

import math
from dataclasses import replace

import pytest

from lightrl.core.nodes.cost_model import Forecast, MeanNode, Prices, StepWork

# 10 ms a step and 0.1 ms for each response in it; 10 at once
ENGINE = MeanNode(base=0.01, slope=0.0001, slots=10)
# 200 responses of 100 tokens, the longest of 400
WORK = StepWork(
    num=1, total=20_000, mean=100, alone_s=4.04, arrivals=(0.25, 0.5, 1.0), over_s=2.0, rest_s=0.5
)


def best_window_s(work_s: float, train_s: float, shared: int, others: float) -> float:
    return max(0.0, (work_s - others * train_s) / (shared + others))


def forecast(
    kinds: dict[str, StepWork], samplers: int = 1, reserved: int = 2, prices: Prices | None = None
) -> Forecast:
    return Forecast(ENGINE, kinds, samplers, reserved, prices)


def test_sampling_is_shared_until_only_the_tail_is_left():
    # two nodes: 10,000 tokens each, in 1000 steps of 10 responses: 1000 x 11 ms
    assert WORK.shared_s(ENGINE, 2) == pytest.approx(11.0)
    assert WORK.rollout_s(ENGINE, 2) == pytest.approx(13.0)
    # 40 nodes: 500 tokens each, but no fewer steps than the mean response has
    assert WORK.shared_s(ENGINE, 40) == pytest.approx(0.01 * 100 + 0.0001 * 500)
    # ever more nodes: the longest response alone takes 400 x 10.1 ms
    assert WORK.rollout_s(ENGINE, math.inf) == pytest.approx(4.04)


@pytest.mark.parametrize(
    ("train_s", "step_s"),
    [
        (0.0, 13.5),  # all groups flat
        (4.0, 13.5),  # 0.5 x 13 s and the other half of 4 s: done before the last groups come
        (20.0, 3.25 + 20.0 + 0.5),  # from the first groups on, the trainer never waits
    ],
)
def test_training_takes_what_does_not_fit_beside_sampling(train_s: float, step_s: float):
    work = replace(WORK, train_s=train_s)
    assert work.step_s(ENGINE, 2) == pytest.approx(step_s)


def test_without_a_node_a_step_never_ends():
    alone = forecast({"plain": WORK}, samplers=0, prices=Prices(1.0, 1.0))
    assert alone.outcome(0).step_s == alone.outcome(0).usd == math.inf
    assert alone.enough() >= 1


def test_kinds_of_rounds_are_weighted_by_how_often_they_come():
    long = StepWork(1, 80_000, 400, 4.0, (0.0, 1.0))
    short = StepWork(4, 20_000, 100, 4.0, (0.0, 1.0))
    both = forecast({"short": short, "long": long}, samplers=2)
    assert both.step_s(0) == pytest.approx((4 * 11.0 + 44.0) / 5)


def test_a_step_costs_the_hours_of_all_nodes():
    priced = forecast({"plain": WORK}, samplers=1, reserved=2, prices=Prices(36.0, 18.0))
    assert priced.outcome(1).step_s == pytest.approx(13.5)
    # two reserved nodes and a preemptible one: 90 US$ an hour
    assert priced.outcome(1).usd == pytest.approx(13.5 * 90 / 3600)


def test_enough_nodes_are_those_with_which_a_step_costs_least():
    priced = forecast({"plain": WORK}, prices=Prices(10.0, 1.0))
    costs = [priced.outcome(n).usd or 0.0 for n in range(100)]
    # but for what is nothing
    assert 0 < priced.enough() <= costs.index(min(costs))
    assert costs[priced.enough()] <= 1.001 * min(costs)
    # dearer ones are worth less, and none at the price of what they cannot save
    dearer = forecast({"plain": WORK}, prices=Prices(10.0, 3.0)).enough()
    assert 0 < dearer < priced.enough()
    assert forecast({"plain": WORK}, prices=Prices(1.0, 1000.0)).enough() == 0


def test_free_nodes_are_worth_having_while_they_save_anything():
    free = forecast({"plain": WORK}, prices=Prices(10.0, 0.0))
    assert free.enough() > forecast({"plain": WORK}, prices=Prices(10.0, 1.0)).enough()
    # all is free: time alone
    assert forecast({"plain": WORK}, prices=Prices(0.0, 0.0)).enough() == free.enough()
    # what is there costs nothing, so no node that costs anything is worth it
    assert forecast({"plain": WORK}, prices=Prices(0.0, 1.0)).enough() == 0


def test_without_prices_each_node_must_save_a_hundredth_of_the_step():
    by_time = forecast({"plain": WORK})
    n = by_time.enough()
    assert (
        by_time.step_s(n - 1) / by_time.step_s(n)
        > 1.01
        > (by_time.step_s(n) / by_time.step_s(n + 1))
    )
    # the trainer takes all the time: nobody else saves any
    bound = replace(WORK, arrivals=(0.0, 0.0), train_s=1000.0)
    assert forecast({"plain": bound}).enough() == 0


def test_the_number_wanted_stays_while_another_saves_next_to_nothing():
    priced = forecast({"plain": WORK}, prices=Prices(10.0, 1.0))
    best = priced.enough()
    assert priced.wanted(best, None) == best
    assert priced.wanted(best, best + 1) == best + 1
    assert priced.wanted(best, 0) == best
    assert priced.wanted(best, 10 * best) == best


# Devices that sample and train in turns: 100 engine-seconds of sampling, 20 s of training

FLUID = MeanNode(base=0.0, slope=0.01, slots=10)
TURNS = StepWork(1, total=10_000, mean=100, arrivals=(0.0, 1.0), train_s=20.0)


@pytest.mark.parametrize("others", [1, 2, 3, 4, 5, 6, 9])
def test_devices_in_turns_train_behind_the_best_window(others: int):
    window_s = best_window_s(100.0, 20.0, shared=2, others=others)
    assert TURNS.step_s(FLUID, 2 + others, shared=2) == pytest.approx(window_s + 20.0)


def test_devices_in_turns_have_enough_others_when_their_window_is_nothing():
    free = Forecast(FLUID, {"plain": TURNS}, 2, 2, Prices(36.0, 0.0), shared=2)
    assert free.enough() == 100 / 20
    assert free.step_s(5) == free.step_s(math.inf) == pytest.approx(20.0)


@pytest.mark.parametrize(("others", "leave"), [(0, True), (1, False)])
def test_devices_that_all_sample_to_the_end_train_after_it(others: int, leave: bool):
    step_s = TURNS.step_s(FLUID, 2 + others, shared=2, leave=leave)
    assert step_s == pytest.approx(100 / (2 + others) + 20.0)


def test_training_behind_a_window_waits_for_groups():
    """All of them come with the last response: the window is the whole rollout."""
    late = replace(TURNS, arrivals=(1.0, 1.0))
    assert late.step_s(FLUID, 3, shared=2) == pytest.approx(100 / 3 + 20.0)


def test_a_response_that_takes_long_alone_does_so_with_any_window():
    long = replace(TURNS, alone_s=60.0)
    assert long.step_s(FLUID, 2 + 9, shared=2) == pytest.approx(60.0)


def test_what_halves_train_beside_the_others_is_saved_only_while_no_others_sample():
    halves = replace(TURNS, rest_s=-5.0)
    assert halves.step_s(FLUID, 2, shared=2) == pytest.approx(50.0 + 20.0 - 5.0)
    assert halves.step_s(FLUID, 5, shared=2) == TURNS.step_s(FLUID, 5, shared=2)
