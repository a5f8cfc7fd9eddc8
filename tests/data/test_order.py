"""Which set and which row is drawn when follows from the seed and the number of the draw alone."""

from collections import Counter

import numpy as np
import pytest

from lightrl.data.order import RowCursor, SetOrder


def cursor(num_rows: int, seed: str = "3", shuffle: bool = True) -> RowCursor:
    return RowCursor(num_rows, seed, shuffle=shuffle)


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    rows = cursor(10)
    drawn = [pair for _ in range(10) for pair in rows.draw(3)]  # draws do not divide the epoch
    assert [epoch for epoch, _ in drawn] == [0] * 10 + [1] * 10 + [2] * 10
    orders = [[i for e, i in drawn if e == epoch] for epoch in range(3)]
    assert all(Counter(order) == Counter(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert cursor(10).draw(30) == drawn
    assert cursor(10, "4").draw(30) != drawn


def test_a_draw_may_span_epochs():
    assert cursor(2, shuffle=False).draw(5) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_the_order_is_the_same_on_every_machine():
    assert cursor(8, "0").draw(8) == [(0, row) for row in ORDER_OF_SEED_0]


ORDER_OF_SEED_0 = [3, 5, 7, 6, 1, 2, 4, 0]


def test_any_row_may_come_first_and_each_about_as_often():
    firsts = Counter(cursor(6, str(seed)).draw(1)[0][1] for seed in range(3000))
    assert sorted(firsts) == list(range(6))
    assert min(firsts.values()) > 400


@pytest.mark.parametrize("num_drawn", range(12))
def test_a_cursor_goes_on_where_another_stopped(num_drawn):
    one, other = cursor(4), cursor(4)
    drawn = [row for _, row in one.draw(num_drawn)]
    other.go_to(num_drawn)
    assert other.draw(9) == one.draw(9)
    other.go_to(num_drawn)
    before = list(other.backwards())
    assert before[: num_drawn % 4] == drawn[::-1][: num_drawn % 4]
    assert sorted(before) == sorted(set(drawn))


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0), (0.7, 0.2, 0.1), (1000.0, 3.0)])
def test_among_any_draws_in_a_row_each_set_has_its_share(shares):
    order = SetOrder(shares, seed=5)
    sets = order.of(0, 20_000)
    for k, share in enumerate(shares):
        taken = np.r_[0, np.cumsum(sets == k)]
        for length in (10, 100, 1000):
            counts = taken[length:] - taken[:-length]
            expected = length * share / sum(shares)
            assert expected - 4 <= counts.min()
            assert counts.max() <= expected + 4


def test_the_set_of_a_draw_depends_on_its_number_and_the_seed():
    order = SetOrder((2.0, 1.0, 1.0), seed=5)
    sets = order.of(0, 500)
    assert [int(order.of(n, 1)[0]) for n in range(500)] == sets.tolist()
    assert order.counts(321) == np.bincount(sets[:321], minlength=3).tolist()
    assert order.counts(0) == [0, 0, 0]
    part = 1 << 20  # is counted at once
    before = np.array(order.counts(part))
    for more in (1, 2, 3, 5, 8):
        after = np.bincount(order.of(part, more), minlength=3)
        assert order.counts(part + more) == (before + after).tolist()
    assert SetOrder((2.0, 1.0, 1.0), seed=6).of(0, 500).tolist() != sets.tolist()
