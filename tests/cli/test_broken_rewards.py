"""Rewards that cannot work end `lightrl up` with one line and a non-zero status."""

import os
import subprocess

import pytest

from tests.support.cli import DEADLINE_S, EMULATED, QUICKSTART, SMALL, arguments, summary

REWARDS = """
def raises(sample):
    return {}["solution"]

def raises_late(sample):
    return 1.0 if sample.response == sample.answer else raises(sample)

def silent_late(sample):
    return 1.0 if sample.response == sample.answer else None

def wants(completions, solution, **columns):
    return [0.0]
"""
MANY_TURNS = """
class MultiTurnEnv:
    max_turns = 5

class SingleTurnEnv(MultiTurnEnv):
    pass

def load_environment(name):
    return MultiTurnEnv()
"""


def up(folder, *overrides: str) -> tuple[int, str]:
    """The status and the last line."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "verifiers.py").write_text(MANY_TURNS)
    done = subprocess.run(
        arguments("up", str(QUICKSTART), "run.name=one", *SMALL, *EMULATED, *overrides, "--no-tui"),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises_late", "KeyError: 'solution'"),
        pytest.param("silent_late", "no score", marks=pytest.mark.e2e),
    ],
)
def test_a_run_whose_rewards_never_say_anything_fails_with_the_reason(tmp_path, function, reason):
    status, line = up(tmp_path, f"reward.functions=rewards.py:{function}", "train.steps=20")
    assert status == 1
    assert f"run failed: step 1: none of 4 responses has a score: {reason} (log: " in line
    assert summary(tmp_path)["steps"] <= 1  # which had no group


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ("data.answer_key=solutoin",),
            f"lightrl: data.answer_key = 'solutoin': no row of {QUICKSTART.parent / 'train.jsonl'} "
            "has it; the columns are answer, prompt",
        ),
        (
            ("reward.functions=rewards.py:wants",),
            "requires solution, which no row has; the columns are answer, prompt",
        ),
        (
            ("reward.functions=rewards.py:raises",),
            "rewards.py:raises: a response to train (",
        ),
        (
            ("data.path=verifiers:words", "reward.functions=verifiers:words"),
            "lightrl: verifiers:words: is a MultiTurnEnv; a prompt has one response, so it must be "
            "a SingleTurnEnv",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(tmp_path, overrides, reason):
    status, line = up(tmp_path, *overrides)
    assert status == 1
    assert reason in line
    assert not (tmp_path / "runs" / "one" / "metrics.jsonl").exists()
