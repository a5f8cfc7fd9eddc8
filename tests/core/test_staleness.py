"""The one definition of staleness, and its bound by admission."""

import pytest

from lightrl.core.rounds.rounds import admissible, staleness


@pytest.mark.parametrize(
    ("spans", "version", "expected"),
    [
        ([(4, 10)], 4, (1, 0, 0)),
        ([(3, 10)], 4, (1, 1, 1)),
        ([(2, 3), (3, 1), (4, 2)], 4, (3, 0, 2)),
        ([(2, 3), (3, 1)], 5, (2, 2, 3)),
        ([(2, 0), (4, 1)], 4, (1, 0, 0)),
        ([], 4, (0, 0, 0)),
    ],
)
def test_staleness_counts_versions_from_the_one_that_is_trained(spans, version, expected):
    assert staleness(spans, version) == expected


@pytest.mark.parametrize(
    ("max_staleness", "version", "admitted", "more"),
    [
        (0, 0, 0, 8),
        (0, 0, 8, 0),
        (0, 1, 8, 8),
        (1, 0, 8, 8),
        (1, 0, 16, 0),
        (2, 3, 40, 8),
        (2, 3, 48, 0),
    ],
)
def test_admission_is_the_formula(max_staleness: int, version: int, admitted: int, more: int):
    assert admissible(max_staleness, version, 8, admitted) == more


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
def test_prompt_admitted_under_a_version_is_trained_max_staleness_later_at_most(max_staleness: int):
    for version in range(10):
        rounds = 0
        while admissible(max_staleness, version, 4, rounds * 4) >= 4:
            rounds += 1
        assert rounds - 1 == version + max_staleness  # the step that trains the last admitted
