"""The restart policy: how many crashes in a row, after which pauses, and what ends a row."""

import pytest

from lightrl.launch import local
from lightrl.launch.slurm import job
from lightrl.rewards import runner
from lightrl.rollout import agent
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.trainer import trainer


def pauses(policy: RestartPolicy) -> list[float]:
    """Until it gives up."""
    crashes, waited = CrashCounter(policy), list[float]()
    while (pause_s := crashes.crashed()) is not None:
        waited.append(pause_s)
    return waited


def test_the_crash_after_the_last_restart_is_given_up():
    assert pauses(RestartPolicy(3)) == [0.0, 0.0, 0.0]
    assert pauses(RestartPolicy(0)) == []


def test_pauses_grow_up_to_the_longest():
    policy = RestartPolicy(5, first_pause_s=1.0, growth=2.0, longest_pause_s=5.0)
    assert pauses(policy) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_progress_begins_a_new_row():
    crashes = CrashCounter(RestartPolicy(2, first_pause_s=1.0, growth=3.0))
    assert [crashes.crashed(), crashes.crashed()] == [1.0, 3.0]
    crashes.progressed()
    assert [crashes.crashed(), crashes.crashed(), crashes.crashed()] == [1.0, 3.0, None]


def test_a_crash_after_a_long_life_is_the_first_of_a_new_row():
    crashes = CrashCounter(RestartPolicy(1, settled_s=10.0))
    assert crashes.crashed(lived_s=2.0) == 0.0
    assert crashes.crashed(lived_s=11.0) == 0.0
    assert crashes.in_a_row == 1
    assert crashes.crashed(lived_s=10.0) is None


def test_who_was_given_up_stays_so():
    crashes = CrashCounter(RestartPolicy(1))
    assert (crashes.crashed(), crashes.is_given_up) == (0.0, False)
    assert [crashes.crashed(), crashes.crashed()] == [None, None]
    assert crashes.is_given_up


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (local.RESTARTS, [0.2, 0.4, 0.8, 1.6, 3.2]),
        (trainer.RESTARTS, pytest.approx([0.2, 0.6, 1.8])),
        (agent.RESTARTS, [0.0, 0.0]),
        (runner.RESTARTS, [0.0, 0.0]),
        (job.RESTARTS, [0.0] * 5),
    ],
    ids=["daemon of lightrl up", "ranks", "engine", "reward worker", "daemon of a Slurm job"],
)
def test_limits_of_each_place(policy: RestartPolicy, expected: object):
    assert pauses(policy) == expected


def test_only_reward_workers_and_slurm_jobs_go_by_how_long_something_lived():
    policies = (local, trainer, agent, runner, job)
    assert [p.RESTARTS.settled_s for p in policies] == [float("inf")] * 3 + [10.0, 120.0]
