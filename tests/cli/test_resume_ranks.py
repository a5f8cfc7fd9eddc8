"""A run that goes on with another number of training ranks is the run that did not."""

import os
import signal
from pathlib import Path

import pytest

from lightrl.metrics import sinks
from tests.support.cli import (
    DEADLINE_S,
    Victims,
    all_end,
    descendants,
    linux_only,
    running,
    summary,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("warm_runs")]
SETTINGS = (
    "train.prompts_per_step=8",
    "rollout.group_size=4",
    "train.optim.lr=1e-5",  # so that no rounding makes other responses
    "train.optim.warmup_steps=100",
    "round.tail_batching=both",
    "round.eta=1.5",
    "round.deferred=restart",  # what is continued depends on when it was put off
    "checkpoint.interval=0",
    "checkpoint.export=never",
)
AFTERWARDS = 8  # steps of the last part: it knows where the run ends, as the undisturbed one does
# What weights, rounds and data decide, and no clock.
SAME = ("loss/policy", "grad_norm", "lr", "entropy", "num_tokens", "num_trained_tokens")
QUEUE = ("rounds", "prompts_put_off", "max_wait_steps", "kept_length", "kept_reward")


def stopped(folder: Path, *overrides: str, resume: bool = False) -> int:
    """Steps done when a run was stopped after some of them."""
    with running(folder, *overrides, resume=resume) as process:
        until(process, "  reward ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert "continue it with: lightrl resume runs/one" in out
    return summary(folder)["steps"]


def finished(folder: Path, *overrides: str, resume: bool = False) -> list[dict[str, float]]:
    with running(folder, *overrides, resume=resume) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return sinks.read(folder / "runs" / "one")


@linux_only
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "key", [pytest.param("train.ranks", marks=pytest.mark.slow), "train.nodes"]
)
def test_one_rank_then_two_then_one(key: str, tmp_path: Path):
    """Two of one node, or one of each of two nodes."""
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    plain.mkdir()
    moved.mkdir()
    first = stopped(moved, "train.steps=100000", *SETTINGS)
    second = stopped(moved, f"{key}=2", resume=True)
    assert 0 < first < second
    steps = f"train.steps={second + AFTERWARDS}"
    other = finished(moved, steps, f"{key}=1", resume=True)
    one = finished(plain, steps, *SETTINGS)
    assert [r["step"] for r in one] == [r["step"] for r in other]
    assert len(one) == second + AFTERWARDS
    for a, b in zip(one, other, strict=True):
        for key in SAME:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), (a["step"], key)
    a, b = (summary(folder)["tail"] for folder in (plain, moved))
    assert a["prompts_put_off"] > 0
    for key in QUEUE:
        assert a[key] == b[key], key
    assert summary(plain)["trained_responses"] == summary(moved)["trained_responses"]


@linux_only
@pytest.mark.timeout(400)
def test_a_run_of_two_replicas_killed_with_all_its_daemons_trains_the_same_again(tmp_path: Path):
    """From the model: there is no checkpoint. A version that came out different would end the
    run."""
    replicas = ("train.ranks=2", "train.replicas=2", "train.max_tokens_per_gpu=64")
    with running(tmp_path, "train.steps=100000", *SETTINGS, *replicas) as process:
        for _ in range(4):
            until(process, "  reward ")
        below, victims = descendants(process.pid), Victims(process)
        names = "head", "trainer-0", "rollout-0"
        for pid in [process.pid, *map(victims.pid, names)]:
            os.kill(pid, signal.SIGKILL)
        assert all_end(below)
    done = max(int(r["step"]) for r in sinks.read(tmp_path / "runs" / "one"))
    records = finished(tmp_path, f"train.steps={done + 3}", resume=True)
    assert done >= 3
    assert summary(tmp_path)["state"] == "finished"
    assert summary(tmp_path)["steps"] == done + 3
    assert any(r["num_trained_tokens"] > 0 for r in records)  # of some steps all groups are flat
    log = (tmp_path / "runs" / "one" / "logs" / "head.log").read_text()
    assert "are trained again" in log
