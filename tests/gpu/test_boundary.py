"""The proof itself: it must believe rounding and nothing else."""

import dataclasses

import numpy as np
import pytest

from tests.gpu.boundary import compare, explain, rounding
from tests.gpu.driver import Asked, Draw, Outcome
from tests.support.race import key, winner

PROMPT = (3, 1, 4, 1, 5)
LAYERS, WIDEST = 4, 256


def logits_of(seed):
    return np.random.default_rng(seed).normal(0, 3, 2000).astype(np.float32)


def drawn(logits, noise):
    return winner(logits, noise)


def outcome(logits, noise):
    token = drawn(logits, noise)
    return Outcome(tokens={"a#0": [7, 8, token, 9]}, draws={noise: Draw(token, logits)})


@pytest.fixture(scope="module")
def two_runs():
    """Of the first response for which logits as far apart as rounding of bfloat16 makes them
    matter."""
    for seed in range(5000):
        asked = Asked("a#0", PROMPT, seed, 4)
        noise = key(seed, len(PROMPT) + 2)
        one = logits_of(seed)
        allowed = rounding(one, "bfloat16", LAYERS, WIDEST)
        other = one + np.random.default_rng(seed + 1).normal(0, allowed / 6, len(one)).astype(
            np.float32
        )
        if drawn(one, noise) != drawn(other, noise):
            return asked, outcome(one, noise), outcome(other, noise)
    raise AssertionError("no race is close")


def proved(asked, one, other, dtype="bfloat16"):
    found = compare([asked], one.tokens, other.tokens)
    assert found.num_tokens == 3
    assert [d.index for d in found.differences] == [2]
    return explain(found, one, other, dtype, LAYERS, WIDEST)


def test_rounding_is_believed(two_runs):
    assert 0.1 < proved(*two_runs) < 1


def test_in_float32_the_same_difference_is_not(two_runs):
    with pytest.raises(AssertionError, match="rounding explains"):
        proved(*two_runs, dtype="float32")


def test_logits_of_another_context_are_not(two_runs):
    asked, one, _ = two_runs
    noise = asked.noise(2)
    other = next(
        o for s in range(9000, 9100) if (o := outcome(logits_of(s), noise)).tokens != one.tokens
    )
    with pytest.raises(AssertionError, match="rounding explains"):
        proved(asked, one, other)


def test_a_token_of_other_noise_is_not(two_runs):
    asked, one, _ = two_runs
    noise = asked.noise(2)
    wrong = drawn(one.draws[noise].logits, noise ^ 1)
    other = Outcome(
        tokens={"a#0": [7, 8, wrong, 9]}, draws={noise: Draw(wrong, one.draws[noise].logits)}
    )
    with pytest.raises(AssertionError, match="not what its logits give"):
        proved(asked, one, other)


def test_a_run_that_does_not_repeat_is_not(two_runs):
    asked, one, other = two_runs
    with pytest.raises(AssertionError, match="not drawn in a second run"):
        proved(asked, one, dataclasses.replace(other, draws={}))


def test_responses_of_other_lengths_are_no_rounding():
    with pytest.raises(AssertionError, match="2 tokens and 3"):
        compare([Asked("a#0", PROMPT, 1, 4)], {"a#0": [1, 2]}, {"a#0": [1, 2, 3]})
