"""What a run has cost, from a core that is driven by hand."""

from lightrl.core.nodes.cost_model import Prices
from lightrl.metrics.cost_and_nodes import cost_figures, cost_row
from tests.core.conftest import Driver


def test_costs_are_those_of_all_nodes_for_the_time_that_they_were_there():
    d = Driver(prices=Prices(36.0, 18.0), group_size=1)
    d.start("a")
    d.join("spot", is_preemptible=True)
    d.now = 100.0
    [first, second] = d.running()
    d.finish(first, 1.0, 9, 9, 9)
    # two reserved nodes at a cent a second, a preemptible one at half of that; 3 tokens
    assert cost_figures(d.core) == {"usd": 2.5, "usd_per_million_tokens": 2.5e6 / 3}
    d.finish(second, 0.0, 9)
    d.next_step()
    assert cost_figures(d.core) == {
        "usd": 2.5,
        "usd_per_million_tokens": 2.5e6 / 4,
        "usd_per_step": 2.5,
    }


def test_free_nodes_cost_nothing_and_unknown_prices_say_nothing():
    free = Driver(prices=Prices(0.0, 0.0))
    free.start("a")
    free.now = 9.0
    free.finish(free.running()[0])
    assert cost_figures(free.core) == {"usd": 0.0, "usd_per_million_tokens": 0.0}
    unknown = Driver()
    unknown.start("a")
    assert cost_figures(unknown.core) == {}
    assert cost_row(unknown.core).usd is None


def test_before_anything_is_learned_nothing_is_foreseen():
    d = Driver(prices=Prices(36.0, 18.0), scale_max=4)
    d.start("a")
    row = cost_row(d.core)
    assert (row.reserved, row.preemptible, row.forecast) == (2, 0, ())
    assert row.enough is row.wanted is None
