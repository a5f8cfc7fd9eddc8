"""A run's prompts come in its order, and each response is as long as it was."""

from itertools import islice

from lightrl.sim.inputs.recorded import drawn_order, measured_lengths
from lightrl.sim.inputs.workload import Cursor


def lengths(*rounds):
    return measured_lengths(rounds, seed=0)


def test_a_response_is_as_long_as_it_was_whatever_its_noise():
    known = lengths([("a", 0, 0, 7, True), ("a", 0, 1, 90, True)], [("a", 1, 0, 20, True)])
    for noise in range(3):
        assert known.length("a", 0, noise, 200, index=0) == 7
        assert known.length("a", 0, noise, 200, index=1) == 90
        assert known.length("a", 1, noise, 200, index=0) == 20
        assert known.length("a", 0, noise, 50, index=1) == 50


def test_of_one_that_was_put_off_it_counts_how_it_ended():
    first, again = ("a", 0, 0, 40, False), ("a", 0, 0, 65, True)
    for rounds in ([first], [again]), ([again], [first]):
        assert lengths(*rounds).length("a", 0, 0, 200, index=0) == 65


def test_one_that_was_given_up_is_longer_than_it_came():
    known = lengths([("a", 0, 0, 40, False), ("b", 0, 0, 30, True), ("b", 0, 1, 77, True)])
    assert known.length("a", 0, 5, 200, index=0) == 77


def test_one_that_was_never_launched_is_as_long_as_another_of_its_prompt():
    known = lengths([("a", 0, 0, 7, True), ("a", 0, 1, 9, True), ("b", 0, 0, 300, True)])
    drawn = {known.length("a", 3, noise, 500, index=8) for noise in range(20)}
    assert drawn == {7, 9}
    assert known.length("unseen", 0, 1, 500) in {7, 9, 300}


def test_prompts_come_in_the_order_in_which_they_were_drawn():
    rounds = {0: [("b", 0, 0, 1, True)], 1: [("a", 0, 0, 1, True), ("c", 0, 0, 1, True)]}
    drawn = {0: [("a", 0), ("b", 0)], 2: [("d", 0)]}  # a is put off unseen, c of another process
    assert drawn_order(drawn, rounds) == (("a", 0), ("b", 0), ("c", 0), ("d", 0))


def test_beyond_the_run_the_epoch_is_finished_and_others_follow():
    cursor = Cursor(4, 1, [("a", 0), ("b", 0), ("c", 0), ("a", 1)])
    drawn = list(islice((cursor.draw() for _ in iter(int, 1)), 12))
    assert drawn[:4] == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]
    assert [epoch for _, epoch in drawn[4:]] == [1, 1, 1, 2, 2, 2, 2, 3]
    assert len({prompt for prompt, _ in drawn[4:7]}) == 3
    assert "a" not in {prompt for prompt, _ in drawn[4:7]}
    assert len({prompt for prompt, _ in drawn[7:11]}) == 4
