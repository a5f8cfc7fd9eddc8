"""Whole runs of the real engine and rank: what a finished one leaves, and drafts from history that
change no response and save steps of the engine."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightrl.metrics import sinks
from tests.support.cli import DEADLINE_S, QUICKSTART, arguments, running, summary

NUM_PROMPTS = 4  # one epoch in each step
STEPS = 4


@dataclass(frozen=True)
class Finished:
    """A run "one" over the longest answers of the quickstart."""

    # where it was started
    folder: Path
    # what it printed
    said: str

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "one"

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.folder)

    @property
    def steps(self) -> list[dict[str, float]]:
        """What each step measured."""
        return sinks.read(self.run_dir)


def finished(folder: Path, *overrides: str) -> Finished:
    rows = (QUICKSTART.parent / "train.jsonl").read_text().splitlines()
    (folder / "queue.py").write_text("raise SystemExit('a file of the user')")
    prompts = folder / "long.jsonl"
    prompts.write_text("\n".join(sorted(rows, key=len)[-NUM_PROMPTS:]) + "\n")
    settings = (
        *(f"data.path={prompts}", f"train.prompts_per_step={NUM_PROMPTS}", f"train.steps={STEPS}"),
        *("rollout.group_size=4", "rollout.max_response_length=105"),
        "node.heartbeat_s=0.1",  # which bring the figures of drafts: the run is over in seconds
    )
    with running(folder, *settings, *overrides) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return Finished(folder, out)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(tmp_path_factory.mktemp("drafted"))


def test_a_run_to_its_end(drafted: Finished):
    out, run_dir = drafted.said, drafted.run_dir
    assert f"step     {STEPS}/{STEPS}  reward" in out
    assert f"finished {STEPS} steps in" in out
    assert f"  run        {run_dir}" in out
    [model] = [line.split()[1] for line in out.splitlines() if line.startswith("  model ")]
    assert (Path(model) / "model.safetensors").exists()
    assert (drafted.folder / "runs" / "latest").resolve() == run_dir
    status = subprocess.run(
        arguments("status"), cwd=drafted.folder, capture_output=True, text=True, check=True
    )
    assert f"step      {STEPS}/{STEPS}" in status.stdout


@pytest.mark.e2e
def test_a_run_with_drafts_has_the_responses_of_one_without(drafted: Finished, tmp_path: Path):
    plain = finished(tmp_path, "speculation.enabled=false")
    assert drafted.summary["responses_digest"] == plain.summary["responses_digest"]
    steps = drafted.steps
    assert steps[0]["history/hit_rate"] == 0.0
    assert [step["history/hit_rate"] for step in steps[1:]] == [1.0] * (STEPS - 1)
    # Nodes say it with their heartbeats: a step may have to wait for its figures until the next
    # one.
    # Whether drafts pay is measured: on a busy machine fewer of them do.
    assert max(step.get("speculation/tokens_per_forward", 0.0) for step in steps) > 1.05
    assert max(step.get("speculation/acceptance", 0.0) for step in steps) > 0.3
    assert not any(key.startswith("speculation/") for step in plain.steps for key in step)
