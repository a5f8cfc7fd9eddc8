"""How many devices an engine spans in the next round: what is published, and what is added."""

from lightrl.core.planner import (
    QUIET_ROUNDS,
    TRIED_AGAIN,
    KindMemory,
    PlannedRound,
    Planner,
    PlannerMemory,
)

SIZES = (1, 2, 4)


class Fleet:
    """Rounds of one planner: what each takes is a function of its kind and size."""

    def __init__(self, *sizes: int) -> None:
        self.planner = Planner(sizes or SIZES)

    def play(self, *preemptions: int, kind: str = "long", pace: float = 1.0, kv: int = 0) -> int:
        """Rounds that preempt so often; the size after them."""
        for count in preemptions:
            size = self.planner.size_for(kind)
            done = PlannedRound(kind, size, count, 100 * pace, 100, kv)
            self.planner.learn(done)
        return self.planner.size_for(kind)


def test_begins_with_the_first_size():
    assert Planner((2, 1, 4)).size_for("short") == 2


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
    assert fleet.planner.size_for("long") == 2


def test_what_does_not_fit_is_not_waited_for():
    for kv, caches, size in (
        (940, {1: 1000}, 1),
        (960, {1: 1000}, 2),  # what is not known, may fit
        (2900, {1: 1000, 2: 3000}, 4),
        (9000, {1: 1000, 2: 3000, 4: 7000}, 1),  # it fits nowhere: the rule decides
    ):
        planner = Planner(SIZES)
        planner.recall(PlannerMemory({"long": KindMemory(1, kv_tokens=kv)}, caches))
        assert planner.size_for("long") == size


def test_no_way_back_to_caches_that_are_too_small():
    fleet = Fleet()
    fleet.planner.set_caches(1, 1000)
    assert fleet.play(10, *[0] * (QUIET_ROUNDS + 1), kv=1500) == 2
    assert fleet.play(*[0] * QUIET_ROUNDS, kv=500) == 1  # its responses have become shorter


def test_a_size_that_is_slower_is_left_and_gets_a_second_chance():
    fleet = Fleet()
    assert fleet.play(10, pace=1.0) == 2
    assert fleet.play(5, pace=1.2) == 1
    assert fleet.play(20, pace=1.0) == 2
    assert fleet.play(5, pace=1.2) == 1
    for k in range(TRIED_AGAIN - 1):
        assert fleet.play(2**k + 20, pace=1.0) == 1
    assert fleet.play(2**TRIED_AGAIN, pace=1.0) == 2


def test_nearly_as_fast_is_not_slower():
    fleet = Fleet()
    assert fleet.play(10, pace=1.0) == 2
    assert fleet.play(0, pace=1.01) == 2


def test_half_the_size_is_undone_if_it_is_slower():
    fleet = Fleet(2, 1)
    assert fleet.play(*[0] * QUIET_ROUNDS, pace=1.0) == 1
    assert fleet.play(0, pace=1.3) == 2
    assert fleet.play(*[0] * QUIET_ROUNDS, pace=1.0) == 1
    assert fleet.play(0, pace=1.3) == 2
    assert fleet.play(*[0] * 2 * QUIET_ROUNDS, pace=1.0) == 2


def test_twice_the_size_is_tried_once_and_kept_only_if_it_is_faster():
    fleet = Fleet()
    assert fleet.play(0, pace=1.0) == 2
    assert fleet.play(0, pace=1.0) == 1
    assert fleet.play(*[0] * 3 * QUIET_ROUNDS, pace=1.0) == 1
    fleet = Fleet()
    assert fleet.play(0, pace=1.0) == 2
    assert fleet.play(0, pace=0.7) == 4  # and so on
    assert fleet.play(0, pace=0.9) == 2
    assert fleet.play(0, 0, 0, pace=0.7) == 2


def test_nothing_larger_is_tried_while_something_is_preempted():
    assert Fleet().play(0, 0, 5, 5, 5, pace=1.0) == 2


def test_a_first_round_that_was_slow_for_other_reasons_decides_nothing():
    fleet = Fleet()
    assert fleet.play(10, pace=5.0) == 2
    assert fleet.play(*[0] * (QUIET_ROUNDS + 2), pace=1.2) == 1
    assert fleet.play(*[0] * (QUIET_ROUNDS - 1), pace=1.0) == 1


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
    assert fleet.planner.size_for("long") == 1


def test_sizes_that_the_run_has_no_more_are_forgotten():
    fleet, other = Fleet(), Fleet(1, 2)
    fleet.planner.set_caches(4, 1000)
    fleet.play(10, 20)
    other.planner.recall(fleet.planner.memory())
    assert other.planner.size_for("long") == 1
    assert other.planner.memory().caches == {}
