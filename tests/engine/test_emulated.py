"""What only the emulated engine promises: tokens that can be predicted, and a length model."""

import time

import pytest

from lightrl.engine.base import EngineSpec
from lightrl.engine.emulated import EmulatedEngine
from lightrl.errors import EngineError
from lightrl.messages.responses import Sampling
from tests.metrics.test_selection_bias import version_file


@pytest.fixture
def emulated(tiny):
    def build(**engine_args):
        return EmulatedEngine(
            EngineSpec("emulated", str(tiny.dir), "auto", 4096, 8, engine_args=engine_args)
        )

    return build


def run(engine, *requests, sampling):
    for r in requests:
        engine.add(r, sampling)
    tokens = {r.response: [] for r in requests}
    reasons = {}
    while engine.num_unfinished():
        for d in engine.step():
            tokens[d.response] += d.token_ids
            if d.finish_reason:
                reasons[d.response] = d.finish_reason
    return tokens, reasons


def test_lengths_vary_around_their_mean_and_end_with_the_stop_token(emulated, ask):
    sampling = Sampling(1.0, stop_token_ids=(1, 0))
    requests = [ask(f"r{i}", [4, 5], 4000, seed=i) for i in range(200)]
    tokens, reasons = run(emulated(mean_length=30), *requests, sampling=sampling)
    assert set(reasons.values()) == {"stop"}
    assert all(t[-1] == 1 and not {0, 1} & set(t[:-1]) for t in tokens.values())
    lengths = [len(t) for t in tokens.values()]
    assert 22 < sum(lengths) / len(lengths) < 40
    assert max(lengths) > 2.5 * sum(lengths) / len(lengths)


def test_a_resumed_response_ends_where_it_would_have_ended(emulated, ask):
    sampling = Sampling(1.0, stop_token_ids=(1,))
    engine = emulated(mean_length=50)
    whole, _ = run(engine, ask("a", [4], 1000, seed=3), sampling=sampling)
    cut = len(whole["a"]) // 2
    rest, _ = run(
        engine, ask("a", [4], 1000 - cut, seed=3, prefix=whole["a"][:cut]), sampling=sampling
    )
    assert whole["a"][cut:] == rest["a"]


def test_unknown_engine_args_are_refused(emulated):
    with pytest.raises(EngineError, match="t1_ms"):
        emulated(t1_ms=3)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"config\.json"):
        EmulatedEngine(EngineSpec("emulated", str(tmp_path), "auto", 64, 1))


def test_it_sleeps_and_wakes_for_as_long_and_frees_as_much_as_it_is_told(emulated):
    engine = emulated(sleep_ms=30, wake_ms=20, sleep_mb=14.8)
    begun_at = time.perf_counter()
    assert engine.sleep() == 14_800_000
    slept_at = time.perf_counter()
    engine.wake()
    assert slept_at - begun_at >= 0.03
    assert time.perf_counter() - slept_at >= 0.02


def test_a_version_changes_some_responses_and_any_version_continues_one_alike(
    emulated, ask, tmp_path
):
    sampling = Sampling(1.0, stop_token_ids=(1,))
    requests = [ask(f"r{i}", [4, 5], 4000, seed=i) for i in range(400)]
    by_version = []
    for version in (1, 2):
        engine = emulated(mean_length=30, restart_change=0.5)
        engine.load_weights(version_file(tmp_path, version))
        by_version.append(run(engine, *requests, sampling=sampling)[0])
    old, new = by_version
    same = sum(old[name] == new[name] for name in old)
    assert 0.17 < same / len(old) < 0.33  # a quarter: neither has changed it
    longest = max(old, key=lambda name: len(old[name]))
    half, seed = len(old[longest]) // 2, int(longest[1:])
    rest = ask("x", [4, 5], 4000, seed=seed, prefix=old[longest][:half])
    tokens, _ = run(engine, rest, sampling=sampling)
    assert tokens["x"] == old[longest][half:]
