"""The same with vLLM engines, whose steps and starts take as long as those of a real run."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos.conftest import LIMIT_S, run_chaos

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_engines_killed_and_frozen_change_no_bit_with_vllm(tmp_path: Path):
    """What vLLM adds to the seeds of test_seeds: an engine killed, one frozen, a node killed with
    its engine, and a coordinator that comes back to them. One node alone gives the same bits."""
    run = ("--engine", "vllm", "--steps", "4", "--reference", str(tmp_path / "reference.json"))
    run_chaos(*run, "--events", "0", "--nodes", "1")
    result = run_chaos(*run, "--events", "4", "--seed", "245")
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
    kinds = {event["event"].rpartition(" rollout")[0] for event in outcome["events"]}
    assert {"kill engine", "freeze engine"} <= kinds


@pytest.mark.slow
def test_more_events_change_no_bit_with_vllm():
    result = run_chaos("--engine", "vllm", "--steps", "5", "--events", "6", "--seed", "31")
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
