"""Whatever is killed, stopped, drained or joins, and whenever: the bits of an undisturbed run."""

from importlib.util import find_spec

import pytest

from tests.chaos.conftest import LIMIT_S, Chaos, run_chaos

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)
EVENTS = "8"


@pytest.mark.parametrize("seed", range(1, 6))
def test_events_change_no_bit(seed: int, chaos: Chaos, undisturbed: dict[str, str]):
    result = chaos("--events", EVENTS, "--seed", str(seed))
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
    assert result["reference"] == undisturbed


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_events_change_no_bit_with_vllm():
    result = run_chaos("--engine", "vllm", "--steps", "5", "--events", "6", "--seed", "31")
    (outcome,) = result["seeds"]
    assert outcome["ok"], outcome.get("why", outcome)
