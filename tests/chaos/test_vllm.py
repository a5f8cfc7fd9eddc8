"""The same with vLLM engines, whose steps and starts take as long as those of a real run."""

from importlib.util import find_spec

import pytest

from tests.chaos.conftest import LIMIT_S, run_chaos

pytestmark = pytest.mark.timeout(3 * LIMIT_S)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_events_change_no_bit_with_vllm():
    result = run_chaos("--engine", "vllm", "--steps", "5", "--events", "6", "--seed", "31")
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
