"""How two sets of logprobs are compared, and what is made of it."""

import math

import pytest

from lightrl.errors import WeightsError
from lightrl.weights.canary import TOLERANCES, arbitrary_text, compare, noise, tolerance


def test_the_largest_difference_counts():
    assert compare([-1.0, -2.0, -3.0], [-1.0, -2.25, -2.9], 0.25) == 0.25
    assert compare([], [], 0.0) == 0.0
    with pytest.raises(WeightsError, match=r"differ by up to 0\.5 .*, more than 0\.25 \(weights"):
        compare([-1.0, -2.0], [-1.0, -1.5], 0.25)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("most", [0.1, math.inf])
def test_what_is_no_number_is_wrong_also_if_both_have_it(wrong: float, most: float):
    for whose, expected, found in (
        ("trainer", [-1.0, wrong], [-1.0, wrong]),
        ("trainer", [wrong], [-1.0]),
        ("engine", [-1.0], [wrong]),
    ):
        with pytest.raises(WeightsError, match=f"the {whose}'s logprobs of the canary are not fin"):
            compare(expected, found, most)


def test_a_logprob_too_few_is_wrong():
    with pytest.raises(WeightsError):
        compare([-1.0, -2.0], [-1.0], 5.0)


def test_the_dtype_that_rounds_most_decides_unless_the_config_does():
    assert tolerance(None, "float32", "float32") == TOLERANCES["float32"]
    assert tolerance(None, "float32", "bfloat16") == TOLERANCES["bfloat16"]
    assert tolerance(None, "bfloat16", "fp8") == math.inf
    assert tolerance(0.02, "bfloat16", "fp8") == 0.02


def test_an_arbitrary_text_follows_from_the_vocabulary_and_is_no_longer_than_is_taken():
    text = arbitrary_text(1000, 512)
    assert text == arbitrary_text(1000, 100)
    assert (len(text), len(set(text)) > 25) == (32, True)
    assert all(0 <= token < 1000 for token in text)
    assert arbitrary_text(1000, 5) == text[:5]
    assert all(0 <= noise(i) < 1 for i in range(1000))
