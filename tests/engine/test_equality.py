"""Engines that run a model agree with transformers, with each other, and across processes."""

import pytest

from lightrl.messages.responses import Sampling
from tests.engine.conftest import EngineClient


@pytest.fixture(scope="session", params=["torch", "vllm"])
def real_engine(request: pytest.FixtureRequest) -> EngineClient:
    """The one place where default tests start vLLM: that its adapter runs is seen here."""
    return request.getfixturevalue(f"{request.param}_engine")


PROMPTS = [[2 + (7 * i + 3 * j) % 30 for j in range(3 + 2 * i)] for i in range(5)]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(1.0), id="T=1"),
        pytest.param(Sampling(0.0), id="greedy"),
        pytest.param(Sampling(0.7, top_p=0.9, top_k=12), id="T=.7,top_p=.9,top_k=12"),
    ],
)
def test_tokens_and_logprobs_equal_those_of_plain_transformers(real, ask, version, sampling):
    """Also the proof that all weights arrived, the tied lm_head included."""
    real.load(version)
    got = real.run(version, sampling, *(ask(f"e{i}", p, 40, seed=i) for i, p in enumerate(PROMPTS)))
    for i, (prompt, outcome) in enumerate(zip(PROMPTS, got, strict=True)):
        tokens, logprobs = real.tiny.reference(version, prompt, i, sampling, 40)
        assert outcome.tokens == tokens
        assert outcome.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_temperatures_may_differ_within_a_batch(real, ask):
    real.generate(1, Sampling(1.0), ask("t0", PROMPTS[0], 60, seed=3))
    real.generate(1, Sampling(0.0), ask("t1", PROMPTS[1], 60, seed=3))
    real.generate(1, Sampling(0.7, top_p=0.8), ask("t2", PROMPTS[2], 60, seed=3))
    outcomes = real.finished("t0", "t1", "t2")
    samplings = (Sampling(1.0), Sampling(0.0), Sampling(0.7, top_p=0.8))
    for prompt, sampling, outcome in zip(PROMPTS, samplings, outcomes, strict=False):
        assert (outcome.tokens, pytest.approx(outcome.logprobs, abs=1e-4)) == real.tiny.reference(
            1, prompt, 3, sampling, 60
        )


@pytest.mark.e2e
def test_a_response_moved_to_another_vllm_process_equals_the_undisturbed_one(
    vllm_engine, start, ask
):
    other = start("vllm", slots=4)
    sampling, num = Sampling(1.0), 80
    for engine in (vllm_engine, other):
        engine.load(1)
    whole = vllm_engine.run(
        1, sampling, *(ask(f"m{i}", p, num, seed=i) for i, p in enumerate(PROMPTS))
    )
    names = [f"c{i}" for i in range(len(PROMPTS))]
    asked = [ask(n, p, num, seed=i) for i, (n, p) in enumerate(zip(names, PROMPTS, strict=True))]
    for _ in range(10):  # it does not wait for us: all may be over before we abort it
        vllm_engine.generate(1, sampling, *asked)
        vllm_engine.until(lambda: all(n in vllm_engine.outcomes for n in names))
        vllm_engine.abort(*((n, 1) for n in names))
        parts = vllm_engine.finished(*names)
        if all(p.finish == "abort" for p in parts):
            break
    assert all(0 < len(p.tokens) < num for p in parts)
    rest = other.run(
        1,
        sampling,
        *(
            ask(f"d{i}", p, num - len(part.tokens), seed=i, prefix=part.tokens, attempt=2)
            for i, (p, part) in enumerate(zip(PROMPTS, parts, strict=True))
        ),
    )
    for w, p, r in zip(whole, parts, rest, strict=True):
        assert p.tokens + r.tokens == w.tokens
        assert p.logprobs + r.logprobs == pytest.approx(w.logprobs, abs=1e-4)
