"""Whatever is killed, stopped, drained or joins, and whenever: the bits of an undisturbed run."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos.conftest import LIMIT_S, Chaos, run_chaos

SEED, *OTHERS = range(1, 4)
EVENTS = "8"
RUNS_AT_ONCE = 2  # mostly they wait, for a lease or for an import
MAX_MISSED = 2  # the run was over before: one that waited for a victim held up the next

pytestmark = pytest.mark.timeout((len(OTHERS) + 2) * LIMIT_S)


@pytest.fixture(scope="module")
def results(
    chaos: Chaos, undisturbed: dict[str, Any]
) -> Iterator[dict[int, "Future[dict[str, Any]]"]]:
    """Of these seeds; the first ones are awaited while others run."""
    with ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        yield {seed: pool.submit(chaos, "--events", EVENTS, "--seed", str(seed)) for seed in OTHERS}
        pool.shutdown(cancel_futures=True)


def test_events_change_no_bit(chaos: Chaos, undisturbed: dict[str, Any]):
    require_same(chaos("--events", EVENTS, "--seed", str(SEED)), undisturbed)


@pytest.mark.e2e
@pytest.mark.parametrize("seed", OTHERS)
def test_events_of_other_seeds_change_no_bit(
    seed: int, results: dict[int, "Future[dict[str, Any]]"], undisturbed: dict[str, Any]
):
    require_same(results[seed].result(), undisturbed)


def require_same(result: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
    assert result["reference"] == undisturbed
    assert len(outcome["missed"]) <= MAX_MISSED


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_more_events_with_real_ranks_and_engines_change_no_bit():
    many = ("--engine", "torch", "--steps", "20", "--events", "12", "--seed", "6,7,8")
    result = run_chaos(*many)
    assert all(outcome["ok"] for outcome in result["seeds"]), result
