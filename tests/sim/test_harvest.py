"""The ideal of scripts/bench/harvest, on cases computed by hand."""

from dataclasses import replace

import pytest

from scripts.bench.harvest_lib.ideal import NODES, Step, Workload, ideal_s, mean_present, trace_of

# 1,000 tokens are 100 engine-seconds and 20 s of training; a response of 100 alone takes 19 s
WORK = Workload(slots=10, t0_s=0.1, half_batch=1 / 0.9, train_token_s=0.04, train_step_s=0.0)
STEP = Step(seconds=99.0, tokens=1000.0, longest=100.0, others=3.0)


@pytest.mark.parametrize(
    ("others", "longest", "seconds"),
    [(0.0, 100.0, 70.0), (3.0, 100.0, 28.0), (6.0, 100.0, 20.0), (6.0, 200.0, 38.0)],
    ids=["reserved alone", "work", "training", "the longest response"],
)
def test_no_step_is_shorter_than_what_binds_it(others: float, longest: float, seconds: float):
    step = replace(STEP, others=others, longest=longest)
    assert ideal_s(WORK, step) == pytest.approx(seconds)


def test_a_node_that_comes_and_goes_counts_for_as_long_as_it_was_there():
    spans = [(0.0, 15.0), (12.0, 14.0), (18.0, 99.0), (3.0, 9.0)]
    assert mean_present(spans, 10.0, 20.0) == pytest.approx((5 + 2 + 2) / 10)


def test_a_trace_is_that_of_its_seed_and_a_hasty_one_has_more_to_say():
    trace = trace_of(1, 600.0)
    assert trace == trace_of(1, 600.0) != trace_of(2, 600.0)
    assert len({event.node for event in trace}) == NODES
    assert len(trace_of(1, 600.0, 3.0)) > 2 * len(trace)
