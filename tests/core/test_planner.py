"""How many devices an engine spans in the next round: what is published, and what is added."""

import pytest

from lightrl.core.sharing.planner import (
    QUIET_ROUNDS,
    EngineKind,
    KindMemory,
    PlannedRound,
    Planner,
    PlannerMemory,
    prior_lengths,
    round_s,
)
from lightrl.messages.load import StepCosts

SIZES = (1, 2, 4)


class Fleet:
    """Rounds of one planner: what each takes is a function of its kind and size."""

    def __init__(self, *sizes: int) -> None:
        self.planner = Planner(sizes or SIZES)

    def play(self, *preemptions: int, kind: str = "long", kv: int = 0) -> int:
        """Rounds that preempt so often; the size after them."""
        for count in preemptions:
            size = self.planner.size_for(kind, {})
            done = PlannedRound(kind, size, count, 100, kv)
            self.planner.learn(done)
        return self.planner.size_for(kind, {})


def test_begins_with_the_first_size():
    assert Planner((2, 1, 4)).size_for("short", {}) == 2


def test_more_preemptions_than_before_double_the_size():
    assert Fleet().play(1) == 2
    assert Fleet().play(100, 106) == 4


def test_about_as_many_preemptions_as_before_change_nothing():
    assert Fleet().play(100, 105) == 2
    assert Fleet().play(100, 50) == 2


def test_the_largest_stays():
    assert Fleet().play(10, 20, 40, 80) == 4


def test_four_quiet_rounds_halve_it():
    fleet = Fleet()
    assert fleet.play(9) == 2
    assert fleet.play(*[0] * (QUIET_ROUNDS - 1)) == 2
    assert fleet.play(0) == 1


def test_a_preemption_in_between_is_not_quiet():
    fleet = Fleet()
    fleet.play(10)
    assert fleet.play(0, 0, 0, 5) == 4
    assert fleet.play(0, 0, 0) == 4


def test_kinds_of_rounds_are_remembered_apart():
    fleet = Fleet()
    assert fleet.play(10, kind="long") == 2
    assert fleet.play(0, 0, 0, kind="short") == 1
    assert fleet.planner.size_for("long", {}) == 2


def test_what_does_not_fit_is_not_waited_for():
    for kv, caches, size in (
        (940, {1: 1000}, 1),
        (960, {1: 1000}, 2),  # what is not known, may fit
        (2900, {1: 1000, 2: 3000}, 4),
        (9000, {1: 1000, 2: 3000, 4: 7000}, 1),  # it fits nowhere: the rule decides
    ):
        planner = Planner(SIZES)
        planner.recall(PlannerMemory({"long": KindMemory(1, kv_tokens=kv)}, caches))
        assert planner.size_for("long", {}) == size


def test_no_way_back_to_caches_that_are_too_small():
    fleet = Fleet()
    fleet.planner.set_caches(1, 1000)
    assert fleet.play(10, *[0] * (QUIET_ROUNDS + 1), kv=1500) == 2
    assert fleet.play(*[0] * QUIET_ROUNDS, kv=500) == 1  # its responses have become shorter


def test_a_larger_size_without_more_room_is_no_help():
    fleet = Fleet()
    fleet.planner.set_caches(1, 1000)
    fleet.planner.set_caches(2, 1000)
    assert fleet.play(10, 20, 40) == 1


def test_one_size_stays():
    assert Fleet(1).play(10, 20, 40) == 1


def test_what_was_learned_goes_on_in_another_planner():
    fleet, other = Fleet(), Fleet()
    fleet.planner.set_caches(1, 1000)
    fleet.play(10, 0, 0)
    other.planner.recall(fleet.planner.memory())
    assert other.planner.memory() == fleet.planner.memory()
    assert other.play(0, 0) == fleet.play(0, 0) == 1
    assert other.play(3) == 2  # and each on its own
    assert fleet.planner.size_for("long", {}) == 1


def test_sizes_that_the_run_has_no_more_are_forgotten():
    fleet, other = Fleet(), Fleet(1, 2)
    fleet.planner.set_caches(4, 1000)
    fleet.play(10, 20)
    other.planner.recall(fleet.planner.memory())
    assert other.planner.size_for("long", {}) == 1
    assert other.planner.memory().caches == {}


def test_where_costs_are_known_the_fastest_is_taken():
    planner = Planner(SIZES)
    assert planner.size_for("short", {1: 30, 2: 20, 4: 25}) == 2
    assert planner.size_for("long", {1: 300, 2: 200, 4: 100}) == 4
    planner.learn(PlannedRound("short", 1, 9, 20, 0, expected_s=20))
    assert planner.size_for("short", {1: 20, 2: 19.8, 4: 25}) == 1  # little is not worth a change
    assert planner.size_for("short", {1: 20, 2: 19, 4: 25}) == 2
    planner.learn(PlannedRound("short", 1, 0, 220, 0, expected_s=20))  # rewards take most of it
    assert planner.size_for("short", {1: 20, 2: 19, 4: 25}) == 1


@pytest.mark.parametrize(
    ("engines", "lengths", "seconds"),
    [
        ((1, 8, 0), [2, 5, 10], 10 + 0.1 * 17),  # the longest decides
        ((2, 8, 0), [10, 4, 3, 3], 10 + 0.1 * 13),  # the engine with the longest
        ((1, 1, 0), [10] * 10, 100 + 5 + 10),  # who has no slot waits
        ((1, 8, 60), [30] * 4, 30 * 4 / 2.4 + 15 + 12),  # contexts of 25 on average
        ((4, 8, 0), [], 0),
    ],
)
def test_seconds_of_a_round(engines: tuple[int, int, int], lengths: list[int], seconds: float):
    kind = EngineKind(*engines, StepCosts(base_s=1.0, response_s=0.1))
    assert round_s(kind, lengths, 10) == pytest.approx(seconds)


def test_context_and_prefill_cost_what_they_cost():
    costs = StepCosts(1.0, 0.0, token_s=0.01, prefill_s=0.5)
    assert round_s(EngineKind(1, 8, 0, costs), [3, 3], 10) == pytest.approx(3 + 0.69 + 10)


def test_lengths_that_nobody_knows_are_within_the_limit_longest_first():
    lengths = prior_lengths(100, 1000)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 1000
    assert 200 < sum(lengths) / 100 < 260
