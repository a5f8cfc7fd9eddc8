"""What an engine's steps cost, by its own measure, against what it is built to take; and its KV
cache, which preempts as vLLM's does."""

import pytest

from lightrl.engine.base import EngineSpec
from lightrl.engine.emulated import EmulatedEngine
from lightrl.engine.step_costs import measure
from lightrl.errors import EngineError
from lightrl.messages.responses import Sampling

GREEDY = Sampling(0.0)


@pytest.fixture
def spec(tiny):
    def build(parallel: int = 0, slots: int = 8, max_length: int = 60, **engine_args: float):
        return EngineSpec(
            *("emulated", str(tiny.dir), "auto", max_length, slots),
            engine_args=engine_args,
            parallel=parallel,
        )

    return build


def tokens_of(engine: EmulatedEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.num_unfinished():
        for delta in engine.step():
            tokens.setdefault(delta.response, []).extend(delta.token_ids)
    return tokens


def test_costs_are_those_that_the_engine_is_built_to_have(spec):
    """Busy machines may add to it."""
    built = spec(2, 32, 200, t0_ms=20.0, half_batch=16.0, faster=2.0, prefill_ms=0.2)
    one_s, many_s = 0.01 * (1 + 1 / 16), 0.01 * (1 + 32 / 16)
    costs = measure(EmulatedEngine(built), built)
    one, many = (costs.base_s + n * costs.response_s for n in (1, 32))
    assert 0.9 * one_s < one < 2 * one_s
    assert 0.9 * many_s < many < 2 * many_s
    assert 0.5 * 0.0001 < costs.prefill_s < 2 * 0.0001


def test_an_engine_that_was_measured_has_nothing_to_do_and_has_preempted_nothing(spec):
    built = spec(1, 8, 60, kv_tokens=64.0)
    engine = EmulatedEngine(built)
    measure(engine, built)
    assert (engine.num_unfinished(), engine.load().num_preemptions) == (0, 0)


def test_what_a_cache_holds_grows_by_what_the_weights_leave_free(spec):
    def capacity(size: int) -> int:
        built = spec(size, kv_tokens=100.0, weights_kv_tokens=70.0)
        return EmulatedEngine(built).load().kv_tokens

    assert [capacity(size) for size in (0, 1, 2, 4)] == [100, 100, 270, 610]
    assert EmulatedEngine(spec(4)).load().kv_tokens == 0


def test_who_grows_out_of_the_cache_is_preempted_and_its_tokens_are_the_same(spec, ask):
    requests = [ask(f"r{k}", [4, 5], 40, seed=k) for k in range(6)]
    tight, roomy = EmulatedEngine(spec(kv_tokens=100.0)), EmulatedEngine(spec())
    for engine in (tight, roomy):
        for request in requests:
            engine.add(request, GREEDY)
    assert tokens_of(tight) == tokens_of(roomy)
    load = tight.load()
    assert load.num_preemptions > 0
    assert (load.kv_tokens, load.running, load.waiting) == (100, 0, 0)
    assert roomy.load().num_preemptions == 0


def test_a_cache_that_does_not_hold_one_response_is_refused(spec):
    with pytest.raises(EngineError, match="a cache of 59 tokens does not hold one sequence of 60"):
        EmulatedEngine(spec(kv_tokens=59.0))
    with pytest.raises(EngineError, match=r"engine_args\.faster = 0"):
        EmulatedEngine(spec(faster=0.0))
