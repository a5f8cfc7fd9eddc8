"""The decision of a job that has to leave, by the output of `scontrol show job`."""

import pytest

from lightrl.launch.slurm.allocation import decided


@pytest.mark.parametrize(
    ("state", "requeue", "restarts", "expected"),
    [
        ("RUNNING", "1", "0", "runs"),
        ("SIGNALING", "1", "0", "runs"),  # seen with 22.05 when a grace time begins
        ("RUNNING", "0", "0", "leaves"),  # sbatch --no-requeue
        ("CANCELLED", "1", "0", "leaves"),
        ("COMPLETING", "1", "0", "leaves"),
        ("COMPLETING", "1", "1", "returns"),
    ],
)
def test_a_job_returns_to_the_queue_unless_slurm_has_decided(state, requeue, restarts, expected):
    facts = {"JobState": state, "Requeue": requeue, "Restarts": restarts}
    assert decided(facts, 0) == expected


def test_slurm_that_does_not_answer_keeps_no_job_here():
    assert decided({}, 0) == "leaves"


def test_an_earlier_restart_is_none_of_this_life():
    facts = {"JobState": "RUNNING", "Requeue": "1", "Restarts": "2"}
    assert decided(facts, 2) == "runs"
