"""What an operator is told of a step that went wrong, or taught nothing."""

import pytest

from lightrl.metrics.round_figures import warnings

FINE = {"round/groups_trained": 4.0, "num_trained_tokens": 900.0}
FLAT = {"round/groups_trained": 4.0, "num_trained_tokens": 0.0}
EMPTY = {"round/groups_trained": 0.0, "round/groups_unscored": 1.0, "round/groups_no_signal": 3.0}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (FINE, []),
        (
            FLAT,
            [
                "nothing was learned in this step: in every group all rewards are equal, or "
                "algorithm.mask_truncated leaves all out"
            ],
        ),
        (
            FINE | {"train/skipped_nonfinite": 1.0},
            ["nothing was learned in this step: its gradient is not finite"],
        ),
        (
            FINE | {"train/skipped_nonfinite": 1.0, "train/updates": 3.0},
            ["1 of 4 updates of this step were left out: their gradients are not finite"],
        ),
        (
            EMPTY,
            [
                "nothing was trained in this step: 1 groups have no rewards; in 3 all rewards are "
                "equal"
            ],
        ),
        (
            FINE | {"train_rollout_logprob_abs_diff": 0.5},
            ["engine and trainer differ by 0.500 in logprobs: stale weights?"],
        ),
        (
            FINE | {"train_rollout_logprob_abs_diff": float("nan")},
            ["engine and trainer differ by nan in logprobs: stale weights?"],
        ),
    ],
)
def test_warnings_of_a_step(record: dict[str, float], told: list[str]):
    assert list(warnings(record)) == [f"WARNING: {line}" for line in told]
